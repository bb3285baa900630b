"""Joining recorded tokens and rendered text."""

from __future__ import annotations

import pytest

from roundhouse.generation.chat import ContinuationBroken, continue_prompt, newest_recorded

END = ord("$")


def join(recorded: str, prefix: str, whole: str) -> str:
    """`continue_prompt` over one-character tokens, so that texts can be compared."""
    ids = continue_prompt(
        [ord(c) for c in recorded],
        prefix,
        whole,
        end_of_turn="$",
        end_of_turn_id=END,
        encode=lambda text: [ord(c) for c in text],
    )
    return "".join(chr(i) for i in ids)


def test_only_the_tail_comes_from_the_render():
    assert join("U:hi$A:HELLO$", "u:hi$a:hello$", "u:hi$a:hello$u:more$a:") == "U:hi$A:HELLO$u:more$a:"


def test_a_generation_cut_by_length_gets_its_end_of_turn_from_the_render():
    assert join("U:hi$A:HEL", "u:hi$a:hel$", "u:hi$a:hel$u:more$a:") == "U:hi$A:HEL$u:more$a:"


def test_a_template_that_strips_older_turns_is_survived_by_counting():
    whole = "u:hi$a:$u:more$a:yes$u:last$a:"
    prefix = "u:hi$a:long thoughts$u:more$a:yes$"
    assert join("U:hi$A:long thoughts$u:more$A:YES$", prefix, whole).endswith("A:YES$u:last$a:")


def test_a_template_without_ends_of_turn_is_refused_in_words():
    with pytest.raises(ContinuationBroken, match="does not end turns"):
        join("U", "u:hi", "u:hi a:")


def test_the_newest_message_with_tokens_is_found():
    recorded = {"role": "assistant", "prompt_token_ids": [1]}
    user = {"role": "user"}
    assert newest_recorded([user, recorded, user, recorded, user]) == 3
    assert newest_recorded([user, {"role": "assistant", "prompt_token_ids": None}]) is None
