"""Prefix continuation: a later turn's prompt begins with exactly the tokens that earlier turns saw and drew.

Invariant: with R = the prompt and generation token IDs recorded on the newest assistant message that carries them, the prompt
is R + encode(tail), where the tail is the rendered text from that message's end of turn on. Nothing of R is ever tokenised
again, so it does not matter that a tokenizer would merge the same text differently.

Where the tail begins: the rendered conversation up to and including that message holds n ends of turn, so the tail begins at
the n-th end of turn of the whole rendered conversation. Counting, instead of taking a position, survives templates that cut
something out of earlier turns (old reasoning). If the recorded generation already ends with the end of turn it is dropped from
the tail; if it was cut by its length limit, the tail supplies it.

    whole:  <user>hi<end> <assistant>he llo<end> <user>more<end> <assistant>
    prefix: <user>hi<end> <assistant>he llo<end>                                 n = 2
    tail:                                  <end> <user>more<end> <assistant>
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roundhouse.errors import DataError
from roundhouse.generation.protocol import TOKEN_FIELDS


class ContinuationBroken(DataError):
    """The rendered conversation cannot be joined to the recorded tokens."""


def newest_recorded(messages: Sequence[dict[str, Any]]) -> int | None:
    """Index of the newest message that carries recorded tokens."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get(TOKEN_FIELDS[0]):
            return index
    return None


def continue_prompt(
    recorded: Sequence[int],
    prefix_text: str,
    whole_text: str,
    *,
    end_of_turn: str,
    end_of_turn_id: int,
    encode: Callable[[str], list[int]],
) -> list[int]:
    """Token IDs of the prompt that continues `recorded`.

    Args:
        recorded: prompt and generation token IDs of the newest recorded message.
        prefix_text: the conversation up to and including that message, rendered without generation prompt.
        whole_text: the whole conversation, rendered with generation prompt.
        end_of_turn: text of the end-of-turn token.
        end_of_turn_id: its token ID.
        encode: text to token IDs, without added special tokens.

    Raises:
        ContinuationBroken: the template writes no end of turn after an assistant message.
    """
    turns = prefix_text.count(end_of_turn)
    position = -1
    for _ in range(turns):
        position = whole_text.find(end_of_turn, position + 1)
        if position < 0:
            break
    if turns == 0 or position < 0:
        raise ContinuationBroken(
            f"The chat template does not end turns with {end_of_turn!r}, so a recorded turn cannot be continued. Use a "
            "template that does, or send the messages without token fields."
        )
    if recorded[-1] == end_of_turn_id:
        position += len(end_of_turn)
    return [*recorded, *encode(whole_text[position:])]
