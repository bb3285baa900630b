"""Each kind of damage planted in real rollouts is caught for its own reason, and nothing else is touched."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from roundhouse.trajectories import validation
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import sequences_table
from tests.gym.kinds import having
from tests.trajectories.collected import SIZE, VERSION, Batch, collected

Plant = Callable[[Rollout, Batch], None]
"""Damages the rollout (of three turns, two of them tool calls)."""

KINDS: list[tuple[str, Plant, str]] = []


def plants(reason: str) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        KINDS.append((plant.__name__, plant, reason))
        return plant

    return keep


@plants("reward")
def a_reward_that_is_no_number(r: Rollout, _: Batch) -> None:
    r.reward = math.nan


@plants("reward")
def a_completed_rollout_without_a_reward(r: Rollout, _: Batch) -> None:
    r.reward = None


@plants("reward_components")
def components_that_do_not_add_up(r: Rollout, _: Batch) -> None:
    r.reward_components = {"format": 0.5, "answer": (r.reward or 0) + 0.5}


@plants("reward_of_failure")
def a_failed_rollout_with_a_zero_reward(r: Rollout, _: Batch) -> None:
    r.status, r.failure_kind, r.failure_code, r.reward = Status.FAILED, FailureKind.INFRA, "tool_timeout", 0.0


@plants("reward_of_failure")
def a_failure_called_completed(r: Rollout, _: Batch) -> None:
    r.failure_kind, r.failure_code = FailureKind.INFRA, "engine_timeout"


@plants("finish_reason")
def a_cut_rollout_called_completed(r: Rollout, _: Batch) -> None:
    r.finish_reason = "max_tokens"


@plants("finish_reason")
def a_whole_rollout_called_truncated(r: Rollout, _: Batch) -> None:
    r.status = Status.TRUNCATED


@plants("finish_reason")
def a_length_limit_that_the_last_call_did_not_reach(r: Rollout, _: Batch) -> None:
    r.status, r.finish_reason = Status.TRUNCATED, "length"


@plants("turn_count")
def a_turn_limit_that_was_not_reached(r: Rollout, _: Batch) -> None:
    r.status, r.finish_reason = Status.TRUNCATED, "max_turns"


@plants("finish_reason")
def a_call_that_ended_in_an_unknown_way(r: Rollout, _: Batch) -> None:
    r.turns[1].finish_reason = "abort"


@plants("sample")
def a_sample_that_nobody_planned(r: Rollout, batch: Batch) -> None:
    batch.recorded[f"{r.group_id}/{SIZE}"] = batch.recorded[r.rollout_id]
    r.sample = SIZE


@plants("timing")
def a_clock_that_ran_backwards(r: Rollout, _: Batch) -> None:
    r.turns[0].latency_seconds = -0.25


@plants("turn_count")
def the_last_turn_lost(r: Rollout, _: Batch) -> None:
    r.turns.pop()


@plants("turn_count")
def tokens_lost_from_the_end(r: Rollout, _: Batch) -> None:
    del r.turns[-1].generation_token_ids[-3:], r.turns[-1].generation_log_probs[-3:]


@plants("no_turns")
def all_turns_lost(r: Rollout, _: Batch) -> None:
    r.turns = []


@plants("turn_order")
def turns_in_another_order(r: Rollout, _: Batch) -> None:
    r.turns[1], r.turns[2] = r.turns[2], r.turns[1]


@plants("turn_order")
def a_turn_that_continues_a_later_one(r: Rollout, _: Batch) -> None:
    r.turns[1].parent = 2


@plants("prompt_length")
def a_length_that_the_engine_did_not_see(r: Rollout, _: Batch) -> None:
    r.turns[1].prompt_length -= 1


@plants("prompt_digest")
def a_prompt_token_changed(r: Rollout, _: Batch) -> None:
    r.turns[0].prompt_token_ids[2] += 1


@plants("prompt_digest")
def a_generated_token_changed_under_a_later_prompt(r: Rollout, _: Batch) -> None:
    r.turns[0].generation_token_ids[1] += 1


@plants("prompt_digest")
def two_tokens_exchanged(r: Rollout, _: Batch) -> None:
    ids = r.turns[1].prompt_token_ids
    at = next(place for place in range(1, len(ids)) if ids[place] != ids[place - 1])
    ids[at - 1], ids[at] = ids[at], ids[at - 1]


@plants("text_mismatch")
def a_last_generated_token_changed(r: Rollout, _: Batch) -> None:
    ids = r.turns[-1].generation_token_ids
    ids[0] = ids[1] if ids[0] != ids[1] else ids[0] - 1


@plants("text_mismatch")
def a_message_changed(r: Rollout, _: Batch) -> None:
    r.items[-1]["content"][0]["text"] += " "


@plants("text_mismatch")
def the_arguments_of_a_call_changed(r: Rollout, _: Batch) -> None:
    call = next(item for item in r.items if item.get("type") == "function_call")
    call["arguments"] = call["arguments"].replace("*", "+")


@plants("text_mismatch")
def a_call_lost_from_the_record(r: Rollout, _: Batch) -> None:
    r.items.remove(next(item for item in r.items if item.get("type") == "function_call"))


@plants("text_mismatch")
def a_message_that_no_token_says(r: Rollout, _: Batch) -> None:
    r.items.append(copy.deepcopy(r.items[-1]))


@plants("text_mismatch")
def the_conversation_of_another_task(r: Rollout, batch: Batch) -> None:
    other = next(each for each in batch.rollouts if each.group_id != r.group_id)
    r.items = r.items[:1] + other.items[1:]


@plants("empty_generation")
def an_empty_generation(r: Rollout, batch: Batch) -> None:
    r.turns[-1].generation_token_ids, r.turns[-1].generation_log_probs = [], []
    _count_anew(r, batch)


@plants("empty_prompt")
def nothing_before_the_first_token(r: Rollout, batch: Batch) -> None:
    r.turns = r.turns[:1]
    r.turns[0].prompt_token_ids, r.turns[0].prompt_length = [], 0
    _count_anew(r, batch)


@plants("generation_length")
def more_tokens_than_a_call_may_have(r: Rollout, batch: Batch) -> None:
    r.turns[-1].generation_token_ids *= 100
    r.turns[-1].generation_log_probs *= 100
    _count_anew(r, batch)


@plants("vocabulary")
def a_token_beyond_the_vocabulary(r: Rollout, batch: Batch) -> None:
    r.turns[-1].generation_token_ids[0] = batch.vocabulary


@plants("vocabulary")
def a_negative_token(r: Rollout, _: Batch) -> None:
    r.turns[-1].generation_token_ids[0] = -100


@plants("log_prob_count")
def a_log_probability_lost(r: Rollout, _: Batch) -> None:
    r.turns[1].generation_log_probs.pop()


@plants("log_prob_value")
def a_log_probability_above_0(r: Rollout, _: Batch) -> None:
    r.turns[1].generation_log_probs[2] = 0.3


@plants("log_prob_value")
def a_log_probability_that_is_no_number(r: Rollout, _: Batch) -> None:
    r.turns[2].generation_log_probs[0] = math.nan


@plants("log_prob_value")
def an_infinite_log_probability(r: Rollout, _: Batch) -> None:
    r.turns[2].generation_log_probs[0] = -math.inf


@plants("log_probs_constant")
def log_probabilities_that_the_engine_did_not_return(r: Rollout, _: Batch) -> None:
    for turn in r.turns:
        turn.generation_log_probs = [0.0] * len(turn.generation_token_ids)


@plants("log_probs_constant")
def log_probabilities_that_were_made_up(r: Rollout, _: Batch) -> None:
    for turn in r.turns:
        turn.generation_log_probs = [-1.0] * len(turn.generation_token_ids)


@plants("policy_version")
def a_turn_of_an_older_version(r: Rollout, _: Batch) -> None:
    r.turns[1].policy_version = VERSION - 1


@plants("not_contiguous")
def a_history_rendered_anew(r: Rollout, batch: Batch) -> None:
    first, second = r.turns[0], r.turns[1]
    second.prompt_token_ids = [*first.prompt_token_ids, *first.generation_token_ids, *second.prompt_token_ids]
    second.parent = None
    _count_anew(r, batch)


@plants("duplicate_rollout")
def a_row_written_twice(r: Rollout, batch: Batch) -> None:
    batch.rollouts.append(copy.deepcopy(r))


@plants("copied_rollout")
def a_row_copied_over_a_sibling(r: Rollout, batch: Batch) -> None:
    original = next(each for each in batch.rollouts if each.group_id == r.group_id and each is not r)
    for name in (
        "turns",
        "items",
        "seed",
        "started_at",
        "seconds",
        "generation_seconds",
        "reward",
        "status",
        "finish_reason",
    ):
        setattr(r, name, copy.deepcopy(getattr(original, name)))
    batch.recorded[r.rollout_id] = batch.recorded[original.rollout_id]


@plants("repeated_seed")
def a_draw_made_twice(r: Rollout, batch: Batch) -> None:
    r.seed = next(each for each in batch.rollouts if each.group_id == r.group_id and each is not r).seed


@plants("task_row")
def a_rollout_of_another_task_in_the_group(r: Rollout, batch: Batch) -> None:
    r.task = next(each for each in batch.rollouts if each.group_id != r.group_id).task


@plants("task_row")
def an_answer_changed_in_the_task_row(r: Rollout, _: Batch) -> None:
    r.task = {**r.task, "answer": -1}


def _count_anew(r: Rollout, batch: Batch) -> None:
    """Correct the stored counts so that they hide the damage."""
    generated = sum(len(turn.generation_token_ids) for turn in r.turns)
    added = sum(len(turn.prompt_token_ids) for turn in r.turns)
    batch.recorded[r.rollout_id] = type(batch.recorded[r.rollout_id])(len(r.turns), generated, generated + added)


@pytest.mark.parametrize(("plant", "reason"), [pytest.param(plant, reason, id=name) for name, plant, reason in KINDS])
def test_planted_damage_goes_to_quarantine_for_its_own_reason(plant: Plant, reason: str) -> None:
    batch = collected("calculator").again()
    batch.recorded = dict(batch.recorded)
    victim = next(each for each in reversed(batch.rollouts) if len(each.turns) == 3)
    plant(victim, batch)
    result = batch.validate()
    assert [(row["rollout_id"], row["reason"]) for row in result.quarantine.to_pylist()] == [
        (victim.rollout_id, reason)
    ]
    assert result.quarantine.column("evidence")[0].as_py()
    assert victim.rollout_id not in result.sequences.column("rollout_id").to_pylist()


@pytest.mark.parametrize(
    "kind", having("calculator", "sort", "lookup", "guess_number", "countdown", "arithmetic_chain", "frozen_lake")
)
def test_clean_rollouts_of_every_environment_pass_and_their_texts_are_proved(kind: str) -> None:
    batch = collected(kind)
    assert Counter(rollout.status for rollout in batch.rollouts)[Status.FAILED] == 0
    result = batch.again().validate()
    assert result.quarantine.to_pylist() == []
    assert result.text_proved == len(batch.rollouts) == result.sequences.num_rows


def test_siblings_that_say_the_same_with_the_same_log_probabilities_are_legal() -> None:
    batch = collected("calculator").again()
    first, second = batch.rollouts[:2]
    for name in ("turns", "items", "reward", "status", "finish_reason"):
        setattr(second, name, copy.deepcopy(getattr(first, name)))
    batch.recorded = {**batch.recorded, second.rollout_id: batch.recorded[first.rollout_id]}
    assert batch.validate().quarantine.num_rows == 0


def shifted_mask(columns: dict[str, np.ndarray]) -> None:
    columns["loss_mask"][:] = np.roll(columns["loss_mask"], 1)


def log_probability_off_the_mask(columns: dict[str, np.ndarray]) -> None:
    columns["gen_logprobs"][np.flatnonzero(columns["loss_mask"] == 0)[3]] = -0.5


def log_probabilities_exchanged(columns: dict[str, np.ndarray]) -> None:
    one, two = np.flatnonzero(columns["loss_mask"])[:2]
    columns["gen_logprobs"][[one, two]] = columns["gen_logprobs"][[two, one]]


def mask_of_another_number(columns: dict[str, np.ndarray]) -> None:
    columns["loss_mask"][0] = 2


@pytest.mark.parametrize(
    "damage", [shifted_mask, log_probability_off_the_mask, log_probabilities_exchanged, mask_of_another_number]
)
def test_a_sequence_that_is_not_what_its_turns_say_does_not_pass(damage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is damaged between its making and its last check."""

    def damaged(accepted) -> pa.Table:
        table = sequences_table(accepted)
        rows = table.to_pylist()
        lists = {name: np.array(rows[5][name]) for name in ("token_ids", "loss_mask", "gen_logprobs")}
        damage(lists)
        rows[5] |= {name: values.tolist() for name, values in lists.items()}
        return pa.Table.from_pylist(rows, schema=table.schema)

    monkeypatch.setattr(validation, "sequences_table", damaged)
    batch = collected("calculator").again()
    result = batch.validate()
    assert result.reasons == {"mask_alignment": 1}
    assert result.sequences.num_rows == len(batch.rollouts) - 1
    assert batch.rollouts[5].rollout_id not in result.sequences.column("rollout_id").to_pylist()
