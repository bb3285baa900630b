"""A version is promoted when it is better beyond noise, and the decision is durable."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.stages.checkpoint import retain
from roundhouse.stages.evaluate import evaluation_metrics
from roundhouse.stages.promotion import promote
from roundhouse.store.run import POINTER, Run, open_run, promoted_version
from roundhouse.store.stage import read_manifest
from roundhouse.trajectories.records import Ledger, Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table


@pytest.fixture
def run(tmp_path) -> Run:
    return open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))


def evaluated(run: Run, version: int, rewards: Sequence[float | None]) -> None:
    """A checkpoint and an evaluation with one rollout a task; None: it failed."""
    checkpoint = run.begin(run.checkpoint(version), policy_version=version).commit()
    rollouts = [
        Rollout(
            f"task-{i}",
            0,
            {"task_id": f"task-{i}"},
            "calculator",
            Status.FAILED if reward is None else Status.COMPLETED,
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]
    attempt = run.begin(run.stage(version, "evaluate"), policy_version=version)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    counts = Ledger.from_rollouts(rollouts, requested=len(rollouts)).counts()
    attempt.commit(inputs={"checkpoint": checkpoint}, counts=counts, metrics=evaluation_metrics(rollouts))


def test_the_first_evaluated_version_is_promoted_and_later_ones_only_when_better_beyond_noise(run: Run):
    evaluated(run, 0, [0.0] * 40 + [1.0] * 10)
    evaluated(run, 1, [0.0] * 39 + [1.0] * 11)
    evaluated(run, 2, [1.0] * 30 + [0.0] * 10 + [1.0] * 10)
    told = [read_manifest(promote(run, version)).details for version in (0, 1, 2)]
    assert [each["promoted"] for each in told] == [True, False, True]
    assert "+0.020 against version 0" in told[1]["why"]
    assert "against version 0" in told[2]["why"]
    assert promoted_version(run) == 2
    assert promoted_version(run) == 2


def test_a_worse_version_is_not_promoted(run: Run):
    evaluated(run, 0, [1.0] * 30 + [0.0] * 20)
    evaluated(run, 1, [0.0] * 30 + [0.0] * 20)
    promote(run, 0)
    assert not read_manifest(promote(run, 1)).details["promoted"]
    assert promoted_version(run) == 0


def test_what_cannot_be_compared_is_not_promoted_and_the_reason_is_on_record(run: Run):
    evaluated(run, 0, [None, None])
    evaluated(run, 1, [1.0, None])
    evaluated(run, 2, [None, 1.0])
    told = [read_manifest(promote(run, version)).details for version in (0, 1, 2)]
    assert [each["promoted"] for each in told] == [False, True, False]
    assert told[0]["why"] == "no rollout of its evaluation has a reward"
    assert "that of version 1" in told[2]["why"]
    assert promoted_version(run) == 1


def test_a_crash_between_decision_and_pointer_is_mended_by_the_next_start(run: Run):
    evaluated(run, 0, [1.0] * 10)
    decision = promote(run, 0)
    run.location.delete(POINTER)
    assert promoted_version(run) is None
    assert promote(run, 0) == decision
    assert promoted_version(run) == 0


def test_passing_by_an_older_decision_again_does_not_move_the_pointer_back(run: Run):
    evaluated(run, 0, [0.0] * 50)
    evaluated(run, 1, [1.0] * 50)
    promote(run, 0)
    promote(run, 1)
    promote(run, 0)
    assert promoted_version(run) == 1


def test_without_an_evaluation_nothing_is_promoted(run: Run):
    with pytest.raises(StoreError, match="Version 3 of run r has no evaluation"):
        promote(run, 3)


def test_promotion_can_be_switched_off(tmp_path):
    config = parse_config({"run_id": "r", "store": str(tmp_path), "evaluation": {"promotion_confidence": None}})
    assert promote(open_run(config), 0) is None


def test_retention_keeps_the_promoted_checkpoint(run: Run):
    for version, rewards in enumerate(([0.0] * 20, [1.0] * 20, [0.0] * 20, [0.0] * 20, [0.0] * 20, [0.0] * 20)):
        evaluated(run, version, rewards)
        promote(run, version)
    assert retain(run, 5) == [2]
    assert run.checkpoint_versions() == [0, 1, 3, 4, 5]
