"""Calls recorded at the model server become turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.config.models import ValidationConfig
from roundhouse.rollout.conversation import chain_calls
from roundhouse.trajectories.records import digest_tokens
from roundhouse.trajectories.schemas import rebuild_prompts
from roundhouse.trajectories.validation import CollectionLimits, validate
from tests.growth import growth
from tests.trajectories.rollouts import rollout

BOTH = CollectionLimits(vocabulary_size=100, policy_version=3, max_age=3)
"""What the capture and a rollout of version 0 were collected under."""


def call(number: int, prompt: list[int], generation: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "call": number,
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation),
        "policy_version": 3,
        "finish_reason": "stop",
        "started_at": float(number),
    } | fields


def test_a_conversation_is_one_chain_and_stores_only_what_each_prompt_adds():
    chained = chain_calls([call(0, [1, 2], [3]), call(1, [1, 2, 3, 4], [5, 6]), call(2, [1, 2, 3, 4, 5, 6, 7], [8])])
    assert chained.reason is None
    assert [turn.parent for turn in chained.turns] == [None, 0, 1]
    assert [turn.prompt_token_ids for turn in chained.turns] == [[1, 2], [4], [7]]
    assert chained.turns[2].prompt_digest == digest_tokens([1, 2, 3, 4, 5, 6, 7])
    assert {turn.policy_version for turn in chained.turns} == {3}


def test_sub_agents_and_compactions_are_roots_and_the_main_line_goes_on_around_them():
    main = [call(0, [1], [2]), call(2, [1, 2, 3], [4]), call(4, [9, 9, 4], [5])]
    chained = chain_calls([*main, call(1, [7], [8]), call(3, [7, 8, 6], [1])])
    assert chained.reason is None
    assert [turn.parent for turn in chained.turns] == [None, None, 0, 1, None]
    assert chained.roots == 3


def test_each_conversation_of_an_agent_behind_the_model_server_is_a_sequence():
    asked, sub_agent = list(range(1, 13)), list(range(20, 33))
    calls = [call(0, asked, [13, 14]), call(1, sub_agent, [33]), call(2, [*asked, 13, 14, 15], [16])]
    made = rollout()
    made.turns = chain_calls(calls).turns
    found = validate([made, rollout(sample=1)], ValidationConfig(), vocabulary_size=100, policy_version=3, terms=BOTH)
    assert (found.reasons, set(found.forks)) == ({}, {"g/0"})
    rows = [row for row in found.sequences.to_pylist() if row["rollout_id"] == "g/0"]
    assert [row["token_ids"] for row in rows] == [[*asked, 13, 14, 15, 16], [*sub_agent, 33]]
    assert [sum(row["loss_mask"]) for row in rows] == [3, 1]


def test_the_longest_prefix_is_the_parent():
    chained = chain_calls([call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3, 4, 5], [6])])
    assert chained.turns[2].parent == 1


def test_a_later_call_is_never_a_parent():
    chained = chain_calls([call(0, [1, 2, 3], [4]), call(1, [1], [2])])
    assert [turn.parent for turn in chained.turns] == [None, None]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([call(0, [1], [2, 3]), call(1, [1, 2], [3]), call(2, [1, 2, 3, 4], [5])], "equal_parents"),
        ([call(0, [1], [2]), call(1, [1, 2, 3], [4]) | {"prompt_token_ids": None}], "missing_tokens"),
        ([call(0, [1], [2], generation_log_probs=[])], "malformed_tokens"),
        ([call(0, [1], ["x"])], "malformed_tokens"),
        ([call(0, [1], [2], policy_version=None)], "missing_policy_version"),
    ],
)
def test_what_joins_in_more_than_one_way_or_is_incomplete_has_a_reason(calls: list[dict[str, Any]], reason: str):
    chained = chain_calls(calls)
    assert chained.reason == reason
    assert chained.detail


def test_answers_to_one_prompt_are_turns_of_their_own_under_the_same_parent():
    """A best-of, or an opinion asked for twice: the main line continues one of the answers, the others end a sequence each."""
    chained = chain_calls(
        [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3], [5]), call(3, [1, 2, 3, 5, 6], [7])]
    )
    assert chained.reason is None
    assert [turn.parent for turn in chained.turns] == [None, 0, 0, 2]
    twice_the_same = chain_calls([call(0, [1], [2]), call(1, [1], [2]), call(2, [1, 2, 3], [4])])
    assert twice_the_same.reason is None
    assert [turn.parent for turn in twice_the_same.turns] == [None, None, 1]


def test_each_answer_to_one_prompt_is_a_sequence_and_what_they_share_is_trained_once():
    asked = list(range(1, 13))
    calls = [call(0, asked, [13]), call(1, [*asked, 13, 14], [15]), call(2, [*asked, 13, 14], [16])]
    made = rollout()
    made.turns = chain_calls(calls).turns
    found = validate([made, rollout(sample=1)], ValidationConfig(), vocabulary_size=100, policy_version=3, terms=BOTH)
    assert (found.reasons, [each.cause for each in found.forks["g/0"]]) == ({}, ["branch"])
    rows = [row for row in found.sequences.to_pylist() if row["rollout_id"] == "g/0"]
    assert [row["token_ids"] for row in rows] == [[*asked, 13, 14, 15], [*asked, 13, 14, 16]]
    assert [sum(row["loss_mask"]) for row in rows] == [2, 1]


def test_an_empty_generation_is_no_turn_and_no_repetition():
    chained = chain_calls([call(0, [1], []), call(1, [1], [2]), call(2, [1, 2, 3], [4])])
    assert (chained.reason, [turn.parent for turn in chained.turns]) == (None, [None, 0])


def test_the_caller_may_know_the_version_that_the_engine_does_not_tell():
    chained = chain_calls([call(0, [1], [2], policy_version=None)], policy_version=7)
    assert chained.turns[0].policy_version == 7


token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@st.composite
def rollouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls that continue an earlier one or begin anew, over so few token values that prefixes coincide by chance."""
    calls: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 8))):
        before: list[int] = []
        if calls and draw(st.booleans()):
            parent = calls[draw(st.integers(0, number - 1))]
            before = parent["prompt_token_ids"] + parent["generation_token_ids"]
        calls.append(call(number, before + draw(token_lists), draw(token_lists)))
    return calls


@given(rollouts())
def test_the_turns_rebuild_every_prompt_and_the_parents_are_those_of_plain_comparison(calls: list[dict[str, Any]]):
    chained = chain_calls(calls)
    assert rebuild_prompts(chained.turns) == [item["prompt_token_ids"] for item in calls]
    ends = [item["prompt_token_ids"] + item["generation_token_ids"] for item in calls]
    ambiguous = False
    for place, item in enumerate(calls):
        prompt = item["prompt_token_ids"]
        lengths = [len(end) if prompt[: len(end)] == end else 0 for end in ends[:place]]
        parent = chained.turns[place].parent
        assert (0 if parent is None else lengths[parent]) == max(lengths, default=0)
        alike = [] if parent is None else [each for each in range(place) if ends[each] == ends[parent]]
        ambiguous |= len({len(calls[each]["prompt_token_ids"]) for each in alike}) > 1
    assert (chained.reason is not None) == ambiguous


@given(rollouts(), st.randoms())
def test_the_order_of_delivery_does_not_matter(calls: list[dict[str, Any]], random: Any):
    shuffled = list(calls)
    random.shuffle(shuffled)
    assert chain_calls(shuffled) == chain_calls(calls)


def test_eight_times_the_branches_cost_about_eight_times_the_time():
    """All pairs of token lists would cost 64 times."""

    def chain(count: int) -> None:
        assert chain_calls(branches[:count]).roots == 1

    root = list(range(2000))
    branches = [call(0, root, [1]), *(call(n, [*root, 1, n], [n]) for n in range(1, 400))]
    assert growth(chain, 50) < 24
