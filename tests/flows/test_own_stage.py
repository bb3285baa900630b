"""A stage of one's own takes three files: what it commits, its task in Prefect, and where an iteration calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from flows import iteration as flows_iteration
from flows.iteration import Source, iteration
from roundhouse.config.loading import parse_config
from roundhouse.imports import load_class
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.report import iteration_manifests, iteration_metrics, iteration_page
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, StageKind
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.stages.test_checkpoint import model_directory, trained

pytestmark = pytest.mark.usefixtures("prefect_client")

FILES = {
    "own_stage.py": """
def measure_difficulty(run, iteration, sequences):
    stage = run.stage(iteration, "difficulty")
    if (done := stage.reference()) is not None:
        return done
    attempt = run.begin(stage, policy_version=iteration - 1)
    return attempt.commit(inputs={"sequences": sequences}, metrics={"difficulty/mean": 0.25})
""",
    "own_task.py": """
from own_stage import measure_difficulty
from tasks.options import stage_task

difficulty = stage_task(name="difficulty", task_run_name="difficulty {iteration}")(measure_difficulty)
""",
    "own_source.py": """
from contextlib import contextmanager

from flows.iteration import Synchronous
from own_task import difficulty


class Measured(Synchronous):
    @contextmanager
    def sequences(self, run, k, base):
        with super().sequences(run, k, base) as sequences:
            difficulty(run, k, sequences)
            yield sequences
""",
}


def committed(kind: str) -> Any:
    """A stage in the place of one that needs an engine."""

    def carry_out(run: Run, k: int, _: Reference) -> Reference:
        attempt = run.begin(run.stage(k, kind), policy_version=k - 1)
        if kind == "collect":
            attempt.write_table("turns", turns_table([]))
            attempt.write_table("rollouts", rollouts_table([]))
        return attempt.commit(metrics={})

    return carry_out


def test_a_stage_from_outside_is_in_the_iteration_its_report_and_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    source: Source = load_class("own_source:Measured", object, "source")()  # type: ignore[assignment]
    tree = {
        "run_id": "own",
        "store": str(tmp_path / "store"),
        "tracking": {"enabled": False},
        "evaluation": {"every": 0},
    }
    run = open_run(parse_config(tree | {"iterations": 3}))
    publish_starting_policy(run, model_directory(tmp_path / "0"), {})
    for kind in ("refit", "collect", "validate"):
        monkeypatch.setattr(flows_iteration, kind, committed(kind))
    weights = model_directory(tmp_path / "1", b"weights 1")
    monkeypatch.setattr(flows_iteration, "train_step", lambda run, k, sequences, base: trained(run, k, weights))
    monkeypatch.setattr(flows_iteration, "checkpoint", publish)

    @flow
    def training() -> None:
        with flows_iteration.iterating_on(source):
            iteration(run.config, 1)
            # A run of several iterations is opened by the flow around them, once
            monkeypatch.setattr(flows_iteration, "open_run", None)
            flows_iteration.carry_out(run, 2)

    training()
    assert run.is_reported(2)
    assert "difficulty" not in set(StageKind)
    manifests = iteration_manifests(run, 1)
    assert iteration_metrics(manifests)["difficulty/mean"] == 0.25
    assert set(manifests["report"].inputs) >= {"validate", "train", "difficulty"}
    assert "| difficulty |" in iteration_page(run, 1, manifests)
