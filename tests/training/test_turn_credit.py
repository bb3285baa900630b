"""Credit by turn: parts of sequences that end with a reward, compared within their group part by part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.training.algorithms import build_algorithm
from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.records import Rollout, Status, Turn
from roundhouse.trajectories.schemas import (
    chains_of,
    rollouts_from_tables,
    rollouts_table,
    sequences_table,
    turns_table,
)

MASK = [0, 0, 1, 1, 0, 1, 0, 1, 1, 0]
"""Turns of the tokens 2 and 3, 5, and 7 and 8."""
ENDS = [4, 6, 9]


def sequence(name: str, rewards: list[float | None], *, group: str = "g", rest: float = 0.0) -> dict[str, Any]:
    given = [{"end": end, "reward": reward} for end, reward in zip(ENDS, rewards, strict=True) if reward is not None]
    return {
        "sequence_id": name, "rollout_id": name, "group_id": group, "token_ids": list(range(10)), "loss_mask": MASK,
        "gen_logprobs": [-0.5 * trained for trained in MASK], "policy_version": 0,
        "reward": sum(part["reward"] for part in given) + rest, "turn_rewards": given,
    }  # fmt: skip


def by_turn(rows: list[dict[str, Any]], **switches: Any) -> np.ndarray:
    """[sequence, turn] advantages, which do not differ within a turn."""
    algorithm = build_algorithm(GRPOConfig(**{"normalize_by_std": False} | switches))
    found = algorithm.compute(TrainingSequences.from_records(rows)).columns.advantages.reshape(len(rows), len(MASK))
    assert (found[:, 2] == found[:, 3]).all()
    assert (found[:, 7] == found[:, 8]).all()
    assert not found[:, np.array(MASK) == 0].any()
    return found[:, [2, 5, 7]]


def test_without_a_discount_each_turn_answers_for_its_own_reward() -> None:
    rows = [sequence("a", [1.0, 0.0, 1.0]), sequence("b", [0.0, 0.0, 1.0])]
    np.testing.assert_allclose(by_turn(rows, turn_discount=0.0), [[0.5, 0, 0], [-0.5, 0, 0]])
    np.testing.assert_allclose(by_turn(rows), [[0.5] * 3, [-0.5] * 3])


@pytest.mark.parametrize(("later", "expected"), [(2.0, [[0.5, -1.0], [-0.5, 1.0]]), (1.0, [[0.5, -0.5], [-0.5, 0.5]])])
def test_a_turn_that_begins_a_sequence_anew_answers_as_in_one_sequence(
    later: float, expected: list[list[float]]
) -> None:
    """Two rollouts with one reward a turn, a: 1 then 0, b: 0 then 1 or 2; in one sequence each, or in two."""
    rewards = {"a": [1.0, 0.0], "b": [0.0, later]}
    whole = [
        {**one_turn(name, parts), "token_ids": [0, 1, 2, 3], "loss_mask": [0, 1, 0, 1], "gen_logprobs": [0.0, -1.0] * 2}
        | {"turn_rewards": [{"end": 2, "reward": parts[0]}, {"end": 4, "reward": parts[1]}]}
        for name, parts in rewards.items()
    ]
    split = [
        {**one_turn(name, parts), "sequence_id": f"{name}/{turn}", "turn_rewards": [{"end": 2, "reward": parts[turn]}]}
        for name, parts in rewards.items()
        for turn in (0, 1)
    ]
    algorithm = build_algorithm(GRPOConfig(normalize_by_std=False, turn_discount=0.0))
    for rows in (whole, split):
        sequences = TrainingSequences.from_records(rows)
        result = algorithm.compute(sequences)
        np.testing.assert_allclose(result.columns.advantages[sequences.loss_mask].reshape(2, 2), expected)


def one_turn(name: str, rewards: list[float]) -> dict[str, Any]:
    """Return a sequence of one trained token, of a rollout with these rewards."""
    return {
        "sequence_id": name, "rollout_id": name, "group_id": "g", "token_ids": [0, 1], "loss_mask": [0, 1],
        "gen_logprobs": [0.0, -1.0], "policy_version": 0, "reward": sum(rewards),
    }  # fmt: skip


def test_later_rewards_count_with_the_discount_once_for_each_reward_between() -> None:
    rows = [sequence("a", [0.0, 1.0, 4.0]), sequence("b", [0.0, 0.0, 0.0])]
    expected = np.array([0 + 0.5 * (1 + 0.5 * 4), 1 + 0.5 * 4, 4]) / 2
    np.testing.assert_allclose(by_turn(rows, turn_discount=0.5), [expected, -expected])


def test_a_turn_without_a_reward_answers_for_the_next_one_and_the_last_for_what_is_left() -> None:
    rows = [sequence("a", [None, 1.0, None], rest=3.0), sequence("b", [None, 0.0, None])]
    np.testing.assert_allclose(by_turn(rows, turn_discount=0.0), [[0.5, 0.5, 1.5], [-0.5, -0.5, -1.5]])
    np.testing.assert_allclose(by_turn(rows, turn_discount=1.0), [[2.0, 2.0, 1.5], [-2.0, -2.0, -1.5]])


def test_without_rewards_of_turns_it_is_the_advantage_of_the_rollout() -> None:
    rows = [sequence(name, [None] * 3, rest=reward) for name, reward in (("a", 1.0), ("b", 0.0), ("c", 0.0))]
    for switches in ({}, {"normalize_by_std": True}, {"leave_one_out": True}):
        np.testing.assert_allclose(by_turn(rows, turn_discount=0.0, **switches), by_turn(rows, **switches), rtol=1e-6)


def test_parts_are_compared_within_their_group_and_place_alone_and_sum_to_zero() -> None:
    rng = np.random.default_rng(0)
    rows = [sequence(f"{group}{i}", list(rng.random(3)), group=group) for group in "gh" for i in range(4)]
    found = by_turn(rows, turn_discount=0.0, normalize_by_std=True).reshape(2, 4, 3)
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(axis=1, ddof=1), 1, rtol=1e-4)


def test_a_group_whose_sums_are_equal_still_teaches_where_its_turns_differ() -> None:
    rows = [sequence("a", [1.0, 0.0, 0.0]), sequence("b", [0.0, 1.0, 0.0])]
    assert not by_turn(rows).any()
    np.testing.assert_allclose(by_turn(rows, turn_discount=0.0), [[0.5, -0.5, 0], [-0.5, 0.5, 0]])


def test_sequences_that_are_selected_keep_theirs() -> None:
    rows = [sequence("a", [1.0, 0.0, 0.0]), sequence("b", [0.0, 1.0, 2.0])]
    chosen = TrainingSequences.from_records(rows).select(np.array([False, True]))
    assert chosen.turn_rewards == [[(4, 0.0), (6, 1.0), (9, 2.0)]]


def turn(number: int, reward: float | None, parent: int | None) -> Turn:
    return Turn(number, parent, [1, 2, 3], 3, "", [4, 5], [-0.5, -0.25], 0, "stop", 0.1, reward=reward)


def test_the_store_keeps_them_and_a_dataset_of_before_reads_as_without() -> None:
    turns = [turn(0, None, None), turn(1, 0.25, 0), turn(2, 0.5, 1)]
    rollout = Rollout("g", 0, {}, "world", Status.COMPLETED, reward=0.75, turns=turns, finish_reason="stop")
    rollouts, kept = rollouts_table([rollout]), turns_table([rollout])
    assert [each.reward for each in rollouts_from_tables(rollouts, kept)[0].turns] == [None, 0.25, 0.5]
    sequences = sequences_table([(rollout, chains_of(turns))])
    assert TrainingSequences.from_table(sequences).turn_rewards == [[(10, 0.25), (15, 0.5)]]
    assert TrainingSequences.from_table(sequences.drop_columns("turn_rewards")).turn_rewards == [[]]
    older = kept.drop_columns("reward")
    assert [each.reward for each in rollouts_from_tables(rollouts, older)[0].turns] == [None] * 3


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"reward": {"truncated_factor": 0.5}}, "turn_discount is 0.0 and reward"),
        ({"kl_coefficient": 0.1, "kl_placement": "reward"}, "turn_discount is 0.0 and kl_placement: reward"),
        ({"turn_discount": 1.5}, "less than or equal to 1"),
    ],
)
def test_what_changes_the_reward_of_whole_rollouts_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        GRPOConfig(**{"turn_discount": 0.0} | keys)
