"""A function of the configuration is a stage of each iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from roundhouse.config.loading import parse_config
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.report import iteration_manifests, iteration_metrics, iteration_page
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference, StageKind
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from roundhouse_flows import iteration as flows_iteration
from roundhouse_flows.iteration import Synchronous, iteration
from tests.stages.test_checkpoint import model_directory, trained

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("prefect_client")]

OWN_STAGE = """
def difficulty(run, iteration, sequences):
    with open("calls.txt", "a") as file:
        file.write(f"{iteration} {sequences.kind}\\n")
    return {"mean": 0.25}
"""


def committed(kind: str) -> Any:
    """Commit a stage that would need an engine."""

    def carry_out(run: Run, k: int, _: Reference) -> Reference:
        attempt = run.begin(run.stage(k, kind), policy_version=k - 1)
        if kind == "collect":
            attempt.write_table("turns", turns_table([]))
            attempt.write_table("rollouts", rollouts_table([]))
        return attempt.commit(metrics={})

    return carry_out


def test_a_stage_of_the_configuration_is_in_the_iteration_its_report_and_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_stage.py").write_text(OWN_STAGE)
    monkeypatch.chdir(tmp_path)
    tree = {
        "run_id": "own",
        "store": str(tmp_path / "store"),
        "tracking": {"enabled": False},
        "evaluation": {"every": 0},
        "stages": {"after_validate": ["own_stage.py:difficulty"]},
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
        with flows_iteration.iterating_on(Synchronous()):
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
    assert Path("calls.txt").read_text() == "1 validate\n2 validate\n"
