"""The report of an iteration has the calls of the API server that its stages made."""

from __future__ import annotations

from pathlib import Path

from roundhouse.config.loading import parse_config
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.report import report_iteration
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest


def test_the_calls_of_all_stages_are_added_up_and_a_run_elsewhere_has_no_such_number(tmp_path: Path) -> None:
    run = open_run(parse_config({"run_id": "calls", "store": str(tmp_path)}))
    for iteration, counted in ((1, True), (2, False)):
        made = {"collect": {"rollout/kubernetes_calls": 20.0}, "train": {"train/kubernetes_calls": 8.0}}
        for kind in ("collect", "validate", "train"):
            stage = run.begin(run.stage(iteration, kind), policy_version=iteration)
            stage.commit(metrics=made.get(kind, {}) if counted else {})
        # a version's manifest repeats what its train stage told
        run.begin(run.checkpoint(iteration), policy_version=iteration).commit(metrics=made["train"] if counted else {})
        metrics = read_manifest(report_iteration(run, iteration)).metrics
        assert metrics.get("kubernetes/calls") == (28.0 if counted else None)
    assert meaning_of("kubernetes/calls") is not None
