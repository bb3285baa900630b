"""A ledger is compared with its rows at every use: reader, trainer and `store verify` find planted differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.stages.train import train_iteration
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, read_table
from roundhouse.store.verification import verify
from roundhouse.trajectories.records import (
    FailureKind,
    Ledger,
    LedgerError,
    Rollout,
    Status,
    ledger_faults,
    prove_counted,
    prove_trainable,
)
from roundhouse.trajectories.schemas import RewardOfFailure, rollouts_table, turns_table
from tests.trajectories.rollouts import rollout

Tables = dict[str, pa.Table]


def sound() -> list[Rollout]:
    """Two groups of two, of which one rollout failed, and one more group that lost a member to it."""
    made = [rollout(group, sample, reward=float(sample)) for group in ("a", "b", "c") for sample in (0, 1)]
    for number, each in enumerate(made):  # no two are copies of one another
        each.started_at, each.seed = 10.0 + number, number
    broken = made[-1]
    broken.status, broken.reward = Status.FAILED, None
    broken.failure_kind, broken.failure_code, broken.finish_reason = FailureKind.INFRA, "tool_timeout", ""
    return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    tree = {
        "run_id": "r",
        "store": str(tmp_path / "store"),
        "rollout": {"group_size": 2},
        "validation": {"check_text": False},
        "environment": {"kind": "calculator"},
    }
    return open_run(parse_config(tree))


def committed(
    run: Run, rollouts: list[Rollout], counts: dict[str, int], plant: Callable[[pa.Table], pa.Table]
) -> Reference:
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", plant(rollouts_table(rollouts)))
    return attempt.commit(counts=counts, details={"failures": {"tool_timeout": 1}})


def column_set(table: pa.Table, row: int, **values: Any) -> pa.Table:
    rows = table.to_pylist()
    rows[row] |= values
    return pa.Table.from_pylist(rows, schema=table.schema)


COUNTS = Ledger.from_rollouts(sound()).counts()

PLANTED: dict[str, tuple[dict[str, int], Callable[[pa.Table], pa.Table], str]] = {
    "a reward on a failed row": (COUNTS, lambda t: column_set(t, 5, reward=0.0), "failed have a reward, such as c/1"),
    "a failure called completed": (COUNTS, lambda t: column_set(t, 5, status="completed"), "6 rollouts|dataset has 6"),
    "a lost row": (COUNTS, lambda t: t.slice(1), "5 completed, the rollouts dataset has 4"),
    "a row twice": (COUNTS, lambda t: pa.concat_tables([t.slice(0, 1), t.slice(0, 1), t.slice(2)]), "more than once"),
    "a ledger that does not balance": (COUNTS | {"requested": 7}, lambda t: t, "does not balance: requested 7"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_store_verify_finds_what_was_planted_although_every_digest_holds(run: Run, name: str) -> None:
    counts, plant, told = PLANTED[name]
    committed(run, sound(), counts, plant)
    assert verify(run.config.store).problems == [], "the bytes are those that were committed"
    problems = verify(run.config.store, also=ledger_faults).problems
    assert any(any(part in problem.what for part in told.split("|")) for problem in problems), problems
    assert all("does this stage again" in problem.remedy for problem in problems)


def test_a_sound_iteration_has_no_fault_through_validation(run: Run) -> None:
    collected = committed(run, sound(), COUNTS, lambda table: table)
    validated = validate_iteration(run, 1, collected, 100)
    assert validated.counts["requested"] == collected.counts["requested"] == 6
    assert (validated.counts["failed"], validated.counts["omitted"]) == (1, 1)
    assert verify(run.config.store, also=ledger_faults).problems == []
    prove_trainable(validated.counts, read_table(validated, "sequences"))


def test_the_writer_refuses_a_reward_of_a_failure() -> None:
    broken = sound()[-1]
    broken.reward = 0.0
    with pytest.raises(RewardOfFailure, match=r"c/1 is failed and has reward 0\.0"):
        rollouts_table([broken])


def test_the_gate_keeps_a_planted_reward_of_a_failure_from_training(run: Run) -> None:
    collected = committed(run, sound(), COUNTS, lambda table: column_set(table, 5, reward=1.0))
    validated = validate_iteration(run, 1, collected, 100)
    assert "c/1" not in read_table(validated, "sequences").column("rollout_id").to_pylist()
    assert validated.counts["failed"] == 1


def test_validation_refuses_rollouts_that_are_not_those_of_their_ledger(run: Run) -> None:
    collected = committed(run, sound(), COUNTS, lambda table: column_set(table, 5, status="completed", reward=0.0))
    with pytest.raises(LedgerError, match="completed 5 counted, 6 there, failed 1 counted, 0 there"):
        validate_iteration(run, 1, collected, 100)


def test_the_trainer_refuses_a_planted_sequence_of_a_failed_rollout(run: Run, tmp_path: Path) -> None:
    collected = committed(run, sound(), COUNTS, lambda table: table)
    validated = validate_iteration(run, 1, collected, 100)
    table = read_table(validated, "sequences")
    planted = column_set(table.slice(0, 1), 0, rollout_id="c/1", sequence_id="c/1/0", reward=0.0)
    attempt = run.begin(run.stage(2, "validate"), policy_version=0)
    attempt.write_table("sequences", pa.concat_tables([table, planted]))
    reference = attempt.commit(counts=validated.counts)
    with pytest.raises(
        LedgerError, match=r"come from 5 rollouts, but 4 were completed or truncated.*Nothing was trained"
    ):
        train_iteration(run, 2, reference, collected, tmp_path / "cache")
    assert run.stage(2, "train").reference() is None


def test_a_dataset_that_was_never_counted_is_taken_as_it_is() -> None:
    prove_counted({}, sound())
    prove_trainable({}, pa.table({"rollout_id": ["a/0"], "reward": [1.0]}))
