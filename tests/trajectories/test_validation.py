import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.config.models import ValidationConfig
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.validation import CollectionLimits, validate
from tests.trajectories.rollouts import rollout, turn

CONFIG = ValidationConfig()


def check(rollouts: list[Rollout], config: ValidationConfig = CONFIG):
    return validate(rollouts, config, vocabulary_size=10, policy_version=0)


def test_a_sound_rollout_becomes_one_sequence_with_loss_on_the_generated_tokens_only() -> None:
    result = check([rollout(sample=0), rollout(sample=1)])
    row = result.sequences.to_pylist()[0]
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert row["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert row["gen_logprobs"] == [0, 0, -0.5, -0.5, 0, -0.5]
    assert row["version_spans"] == [{"version": 0, "start": 2, "end": 6}]
    assert result.quarantine.num_rows == 0
    assert result.ledger.counts() == {
        "requested": 2,
        "completed": 2,
        "truncated": 0,
        "failed": 0,
        "masked": 0,
        "omitted": 0,
    }


def break_reward(r: Rollout) -> None:
    r.reward = math.nan


def break_prompt_digest(r: Rollout) -> None:
    r.turns[1].prompt_token_ids = [7]


def break_prompt_length(r: Rollout) -> None:
    r.turns[1].prompt_length += 1


def break_log_prob_count(r: Rollout) -> None:
    r.turns[0].generation_log_probs.pop()


def break_log_prob_sign(r: Rollout) -> None:
    r.turns[0].generation_log_probs[1] = 0.5


def break_log_prob_nan(r: Rollout) -> None:
    r.turns[1].generation_log_probs[0] = math.nan


def break_vocabulary(r: Rollout) -> None:
    r.turns = [turn(0, [], [1, 2], [3, 10])]


def break_version(r: Rollout) -> None:
    r.turns[1].policy_version = 3


def break_generation(r: Rollout) -> None:
    r.turns = [turn(0, [], [1, 2], [])]


def break_turns(r: Rollout) -> None:
    r.turns = []


def break_order(r: Rollout) -> None:
    r.turns.reverse()


def break_contiguity(r: Rollout) -> None:
    r.turns[1] = turn(1, [], [1, 2, 9, 9, 5], [6])


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (break_reward, "reward"),
        (break_prompt_digest, "prompt_digest"),
        (break_prompt_length, "prompt_length"),
        (break_log_prob_count, "log_prob_count"),
        (break_log_prob_sign, "log_prob_value"),
        (break_log_prob_nan, "log_prob_value"),
        (break_vocabulary, "vocabulary"),
        (break_version, "policy_version"),
        (break_generation, "empty_generation"),
        (break_turns, "no_turns"),
        (break_order, "turn_order"),
        (break_contiguity, "not_contiguous"),
    ],
)
def test_a_broken_rollout_goes_to_quarantine_with_its_reason_and_not_to_training(breaks, reason: str) -> None:
    broken = rollout(sample=2)
    breaks(broken)
    result = check([rollout(sample=0), rollout(sample=1), broken])
    [row] = result.quarantine.to_pylist()
    assert (row["rollout_id"], row["reason"], row["outcome"]) == ("g/2", reason, "masked")
    assert row["evidence"]
    assert result.sequences.column("rollout_id").to_pylist() == ["g/0", "g/1"]
    assert (result.ledger.completed, result.ledger.masked) == (2, 1)


def test_on_a_break_truncate_keeps_what_came_before_it() -> None:
    broken = rollout(sample=1)
    break_contiguity(broken)
    result = check([rollout(), broken], ValidationConfig(on_break="truncate"))
    assert result.sequences.to_pylist()[1]["token_ids"] == [1, 2, 3, 4]


def test_on_a_break_split_begins_a_new_sequence_of_the_same_rollout() -> None:
    broken = rollout(sample=1)
    break_contiguity(broken)
    result = check([rollout(), broken], ValidationConfig(on_break="split"))
    rows = result.sequences.to_pylist()[1:]
    assert [row["sequence_id"] for row in rows] == ["g/1/0", "g/1/1"]
    assert [row["token_ids"] for row in rows] == [[1, 2, 3, 4], [1, 2, 9, 9, 5, 6]]
    assert rows[1]["loss_mask"] == [0, 0, 0, 0, 0, 1]
    assert result.ledger.completed == 2


def test_a_turn_that_is_not_trained_stays_in_the_sequence_without_loss() -> None:
    first = rollout(sample=0)
    first.turns[0].trained = False
    row = check([first, rollout(sample=1)]).sequences.to_pylist()[0]
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert row["loss_mask"] == [0, 0, 0, 0, 0, 1]
    assert row["gen_logprobs"] == [0, 0, 0, 0, 0, -0.5]


def test_an_untrained_turn_is_proved_like_any_other() -> None:
    broken = rollout(sample=0)
    broken.turns[0].trained = False
    broken.turns[0].prompt_length += 1
    assert check([broken, rollout(sample=1), rollout(sample=2)]).reasons == {"prompt_length": 1}


def test_a_rollout_of_untrained_turns_is_masked_and_a_chain_of_them_makes_no_sequence() -> None:
    nothing = rollout(sample=0)
    for each in nothing.turns:
        each.trained = False
    split = rollout(sample=1)
    break_contiguity(split)
    split.turns[0].trained = False
    result = check([nothing, split, rollout(sample=2)], ValidationConfig(on_break="split"))
    assert result.reasons == {"nothing_trained": 1}
    assert [row["rollout_id"] for row in result.sequences.to_pylist()] == ["g/1", "g/2"]


def test_a_group_that_lost_too_many_members_is_omitted_whole() -> None:
    broken = rollout("small", 1)
    break_vocabulary(broken)
    result = check([rollout("small", 0), broken, rollout("big", 0), rollout("big", 1)])
    assert set(result.sequences.column("group_id").to_pylist()) == {"big"}
    assert {row["rollout_id"]: row["outcome"] for row in result.quarantine.to_pylist()} == {
        "small/0": "omitted",
        "small/1": "masked",
    }
    assert (result.ledger.completed, result.ledger.masked, result.ledger.omitted) == (2, 1, 1)


def test_a_failed_rollout_is_counted_and_never_trained_on() -> None:
    failed = rollout(sample=2, reward=None, status=Status.FAILED)
    failed.failure_code = "engine_unreachable"
    result = check([rollout(sample=0), rollout(sample=1), failed])
    assert result.ledger.failed == 1
    assert result.ledger.failures == {"engine_unreachable": 1}
    assert "g/2" not in result.sequences.column("rollout_id").to_pylist()


def test_a_rollout_that_occurs_twice_is_not_trained_on_at_all() -> None:
    result = check([rollout(sample=0), rollout(sample=1), rollout(sample=2), rollout(sample=2)])
    assert result.sequences.column("rollout_id").to_pylist() == ["g/0", "g/1"]
    assert result.reasons == {"duplicate_rollout": 1}
    assert result.ledger.requested == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(Status)), st.integers(0, 3), st.booleans()), max_size=20))
def test_the_ledger_balances_whatever_comes(outcomes: list[tuple[Status, int, bool]]) -> None:
    rollouts = []
    for index, (status, group, broken) in enumerate(outcomes):
        one = rollout(f"g{group}", index, reward=1.0 if status.rewarded else None, status=status)
        if broken:
            break_vocabulary(one)
        rollouts.append(one)
    result = check(rollouts)
    assert result.ledger.requested == len(rollouts)
    trained = set(result.sequences.column("rollout_id").to_pylist())
    assert len(trained) == result.ledger.completed + result.ledger.truncated
    assert trained.isdisjoint(result.quarantine.column("rollout_id").to_pylist())


@pytest.mark.parametrize(("valid", "kept"), [(2, 0), (15, 0), (16, 16), (32, 32)])
def test_what_is_left_of_a_group_counts_only_if_it_is_half_of_one(valid: int, kept: int) -> None:
    """With any number of failures: of 32, two survivors had the weight of a whole group."""
    for lost in (0, 32 - valid):
        members = [rollout(sample=i) for i in range(valid)]
        members += [rollout(sample=valid + i, reward=None, status=Status.FAILED) for i in range(lost)]
        terms = CollectionLimits(vocabulary_size=10, policy_version=0, group_size=32)
        result = validate(members, CONFIG, vocabulary_size=10, policy_version=0, terms=terms)
        assert result.sequences.num_rows == kept
        assert result.reasons.get("small_group", 0) == valid - kept
