"""Scenarios from the stored records of a run."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.plugins.lab.simulation.comparison import recorded_iterations, recorded_scenario
from roundhouse.plugins.lab.simulation.run import simulate
from roundhouse.plugins.lab.simulation.scenario import parse_scenario
from roundhouse.store.run import Run, open_run
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import rollouts_table, turns_table

SECONDS = [[3.0, 1.0, 1.0, 2.0], [9.0, 1.0, 1.0, 1.0]]


def recorded_run(place, *, failed: bool = False, **rollout) -> Run:
    """Two iterations of four rollouts in two slots."""
    settings = {"prompts_per_iteration": 2, "group_size": 2, "concurrency": 2, **rollout}
    run = open_run(
        parse_config(
            {"run_id": "r", "store": str(place), "iterations": 2, "rollout": settings, "train": {"minibatches": 1}}
        )
    )
    for iteration, durations in enumerate(SECONDS, 1):
        rollouts = [
            Rollout(f"g{i // 2}", i % 2, {}, "calculator", Status.COMPLETED, reward=1.0, seconds=seconds)
            for i, seconds in enumerate(durations)
        ]
        if failed:
            rollouts.append(
                Rollout("g9", 0, {}, "c", Status.FAILED, seconds=99.0, failure_kind=FailureKind.INFRA, failure_code="x")
            )
        run.begin(run.stage(iteration, "refit"), policy_version=iteration - 1).commit()
        attempt = run.begin(run.stage(iteration, "collect"), policy_version=iteration - 1)
        attempt.write_table("turns", turns_table(rollouts))
        attempt.write_table("rollouts", rollouts_table(rollouts))
        attempt.commit(metrics={"time/rollouts": max(durations)})
        report = run.begin(run.stage(iteration, "report"), policy_version=iteration)
        report.commit(metrics={"time/iteration": 20.0})
    return run


def test_a_simulated_synchronous_iteration_is_as_long_as_the_recorded_one(tmp_path):
    run = recorded_run(tmp_path)
    found = recorded_iterations(run)
    assert [iteration.rollouts for iteration in found] == SECONDS
    training = [iteration.training for iteration in found]
    assert training == pytest.approx([16, 11], abs=1), "20 s without 4 s and 9 s in two slots"
    outcome = simulate(parse_scenario(recorded_scenario(run) | {"iterations": 100}))
    assert outcome.seconds / 100 == pytest.approx(20, rel=0.1)


def test_a_failed_rollout_is_counted_and_is_no_duration(tmp_path):
    scenario = recorded_scenario(recorded_run(tmp_path, failed=True))
    assert scenario["rollout"]["iterations"] == SECONDS
    assert scenario["faults"]["rollout"] == 0.2


def test_the_command_takes_a_run_and_overrides(tmp_path):
    recorded_run(tmp_path)
    options = ["--from-run", "r", "--store", str(tmp_path), "--mode", "batch-async", "--staleness", "1", "--json"]
    result = CliRunner().invoke(app, ["simulate", *options, "--set", "iterations=30"])
    assert result.exit_code == 0, result.output
    sync, ahead = json.loads(result.stdout)
    assert ahead["speedup"] > 1.2
    assert sync["hours"] == pytest.approx(30 * 20 / 3600, rel=0.15)


def test_a_run_without_a_reported_iteration_or_in_rounds_is_told(tmp_path):
    empty = open_run(parse_config({"run_id": "empty", "store": str(tmp_path)}))
    with pytest.raises(StoreError, match="no reported iteration"):
        recorded_scenario(empty)
    with pytest.raises(StoreError, match="collected in rounds"):
        recorded_scenario(recorded_run(tmp_path, dynamic_sampling={}))
