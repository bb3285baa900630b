"""The numbers of a run: each is correct by its name, and equal wherever it is shown."""

from __future__ import annotations

import io
import json
import re
import statistics
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.loading import parse_config
from roundhouse.console import iteration_line, print_summary
from roundhouse.sql.database import run_query
from roundhouse.stages.evaluate import evaluation_metrics
from roundhouse.stages.report import report_iteration, summarize
from roundhouse.store.lease import driving
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.tracking.mlflow import open_mlflow_run
from roundhouse.trajectories.records import Ledger
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests.sql.stores import make_rollout, write_run


def test_the_time_between_two_processes_is_neither_overhead_nor_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was corrected and resumed after 15 minutes had an "overhead" of 915 s an iteration."""
    replicas = {"generation": {"replicas": 1, "gpus_per_replica": 1.0}}
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)} | replicas))
    clock, later = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: clock() + later)
    for kinds in (("refit", "collect"), ("validate", "train"), ()):
        with driving(run.location):
            for kind in kinds:
                run.begin(run.stage(1, kind), policy_version=1).commit()
            if not kinds:
                metrics = read_manifest(report_iteration(run, 1)).metrics
                run.point_to(run.begin(run.checkpoint(1), policy_version=1).commit())
        later += 900.0
    assert metrics["time/iteration"] < 60
    assert metrics["overhead/total"] < 60
    assert metrics["cost/gpu_seconds"] < 60
    summary = summarize(run)
    assert summary["seconds_between_starts"] == pytest.approx(1800, abs=60)
    screen = Console(file=io.StringIO(), width=120)
    print_summary(screen, summary, {}, [])
    assert "1 iteration in 18" in screen.file.getvalue()
    assert "of them between starts" in screen.file.getvalue()


def test_a_run_that_started_once_has_no_time_between_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver is at work when it sums up, and has renewed its record some seconds ago."""
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    clock, later = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: clock() + later)
    with driving(run.location) as lease:
        lease.renew()
        later += 8.0
        run.point_to(run.begin(run.checkpoint(0), policy_version=0).commit())
        summary = summarize(run)
    assert summary["wall_seconds"] > 8
    assert summary["seconds_between_starts"] < 1


def evaluate(run: Run, version: int, rewards: list[float]) -> None:
    rollouts = [make_rollout(0, version, task, 0, version, "7") for task in range(len(rewards))]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.reward = reward
    attempt = run.begin(run.stage(version, "evaluate"), policy_version=version)
    attempt.write_table("turns", turns_table(rollouts))
    attempt.write_table("rollouts", rollouts_table(rollouts))
    counts = Ledger.from_rollouts(rollouts, requested=len(rollouts)).counts()
    attempt.commit(counts=counts, metrics=evaluation_metrics(rollouts))


def finished_run(tmp_path: Path) -> Run:
    """Two of 30 iterations, which reached the target; with a failed and a masked rollout each, and evaluations."""
    tracking = {"uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "numbers", "system_metrics": False}
    target = {"metric": "evaluation/reward/mean", "at_least": 0.75}
    evaluate_after = {0: [0.0, 0.5, 0.25], 2: [1.0, 0.5, 1.0]}
    with driving(Location(str(tmp_path / "store")) / "runs/r"):
        run = write_run(str(tmp_path / "store"), tasks=4, iterations=2, tracking=tracking, finish=target)
        for version in (0, 1, 2):
            if version in evaluate_after:
                evaluate(run, version, evaluate_after[version])
            report_iteration(run, version)
        run.write_summary(summarize(run) | {"mlflow_complete": True})
    return run


@pytest.mark.real
def test_a_number_that_is_shown_in_two_places_is_the_same(tmp_path: Path) -> None:
    Answers = pytest.importorskip("roundhouse.plugins.view.server").Answers
    run = finished_run(tmp_path)
    store, uri = run.config.store, str(run.config.tracking.uri)
    page = open_mlflow_run(run, uri)
    page.finish()

    def told(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--store", store], env={"COLUMNS": "160", "NO_COLOR": "1"})
        assert done.exit_code == 0, done.output
        return done.stdout

    def history(name: str) -> dict[int, float]:
        return {point.step: point.value for point in page._client.get_metric_history(page.mlflow_run_id, name)}

    summary, shown, cost = summarize(run), told("runs", "show", "r"), json.loads(told("runs", "cost", "r", "--json"))
    [listed] = json.loads(told("runs", "list", "--json"))
    row = next(line for line in told("runs", "list").splitlines() if line.split()[:1] == ["r"])
    curve = {point["iteration"]: point for point in Answers(store).curve({"run": "r"})}
    queried: dict[int, dict[str, float]] = {
        each["iteration"]: dict(each["metrics"])
        for each in run_query(store, "SELECT iteration, metrics FROM iterations").to_pylist()
    }
    readme = next(
        line.split('"')[1]
        for line in Path("README.md").read_text().splitlines()
        if 'roundhouse query "SELECT run_id' in line
    )
    averages = {each["iteration"]: each["avg(reward)"] for each in run_query(store, readme).to_pylist()}

    # rewards of training rollouts, without failed and masked ones
    for k in (1, 2):
        mean = summary["reward_by_iteration"][k - 1]
        facets = Answers(store).facets({"run": "r", "iteration": str(k)})
        everywhere = [curve[k]["reward"], history("reward/mean")[k], queried[k]["reward/mean"], averages[k]]
        assert [*everywhere, facets["span"]["reward"]] == pytest.approx([mean] * 5)
        assert f"reward {mean:.3f}" in iteration_line(k, 2, queried[k])
    # held-out rewards
    for version, evaluation in ((0, summary["evaluation"]["before"]), (2, summary["evaluation"]["after"])):
        mean, error = evaluation["reward_mean"], evaluation["reward_stderr"]
        assert curve[version]["evaluation"] == history("evaluation/reward/mean")[version] == mean
        assert queried[version]["evaluation/reward/mean"] == mean
        assert f"{mean:.3f} ± {error:.3f}" in row
        assert f"{mean:.3f} ± {error:.3f}" in shown
    # iterations and state, of a run that was to make 30
    assert (listed["state"], listed["iterations"], listed["iterations_wanted"]) == ("finished", 2, 2)
    assert " 2/2 " in row
    assert "2 of 2 iterations" in shown
    assert "2 iterations in " in shown
    assert page._client.get_run(page.mlflow_run_id).info.status == "FINISHED"
    # rollouts by outcome
    for name, count in summary["ledger"].items():
        assert count == sum(history(f"ledger/{name}").values())
        assert count == sum(each.get(f"ledger/{name}", 0.0) for each in queried.values())
        assert (f"{count} {name}" in shown) is (count > 0)
    # seconds
    for stage, seconds in summary["stage_seconds"].items():
        if stage != "report":
            assert sum(history(f"time/{stage}").values()) == pytest.approx(seconds, abs=0.01)
    overhead = summary["overhead_seconds_per_iteration"]["overhead/total"]
    assert overhead == pytest.approx(statistics.median(history("overhead/total").values()), abs=0.001)
    assert f"overhead: {overhead:.2f} s an iteration" in shown
    assert cost["wall_seconds"] == summary["wall_seconds"]
    # the bill, and what of it the budget counts
    used = told("runs", "cost", "r")
    whole = {part: sum(cost["bill"][part].values()) for part in ("tokens", "cpu_seconds")}
    assert f"{summary['wall_seconds']:,.0f} s, {whole['cpu_seconds']:,.1f} CPU s." in used
    assert re.search(rf"all +{whole['tokens']:,.0f} +{whole['cpu_seconds']:,.1f}", used)
    counted = cost["totals"]
    for name, metric, unit in (("cpu_hours", "cost/cpu_seconds", 3600), ("wall_hours", "time/iteration", 3600)):
        assert counted[name] == pytest.approx(sum(history(metric).values()) / unit)
        assert curve[2]["cost"][name] == counted[name]
    assert counted["cpu_hours"] * 3600 <= whole["cpu_seconds"] + 0.01
