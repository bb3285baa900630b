"""A run from the user's point of view: the real command, Prefect, MLflow, Ray Serve and vLLM; interrupted, its engine killed,
killed.

The scenario happens once (`story`); each test is a claim about its observations. The last kill comes before the last
report, so that no third engine has to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest
import yaml

from roundhouse.config.loading import load_config
from roundhouse.infra import services
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.store.run import Run, open_run, promoted_version
from roundhouse.store.stage import read_manifest, read_table
from tests.chaos.strikes import PLAN_VARIABLE, Plan, Strike
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ITERATIONS = 5
"""Room for an interruption, a killed engine and a kill, each in an iteration of its own, also where noticing takes long."""
EVALUATED = [0, 3, 5]
CONFIG = {
    "run_id": "story",
    "iterations": ITERATIONS,
    "policy": {"kind": "warm_start", "steps": 60},
    "generation": {"max_model_len": 256},
    "rollout": {"prompts_per_iteration": 4, "group_size": 4},
    "train": {"minibatches": 2},
    "evaluation": {"every": 3, "tasks": 8},
    "checkpoint": {"keep_last": 2},
}
BEFORE_THE_LAST_REPORT = Strike("flow", f"create iterations/{ITERATIONS:06d}/report/manifest.json", "before")
ROOT = Path(__file__).parents[2]
ROUNDHOUSE = Path(sys.executable).with_name("roundhouse")


@dataclass
class Story:
    """Observations of the scenario."""

    directory: Path
    run: Run
    interrupted_code: int = 0
    interrupted_output: str = ""
    left_after_interrupt: list[str] = field(default_factory=list)
    reported_at_interrupt: int = 0
    left_after_kill: list[str] = field(default_factory=list)
    killed_engines: int = 0
    finished_output: str = ""
    again_output: str = ""
    started_again: int = -1
    """Services that the command started for a run that is finished."""
    summary: dict = field(default_factory=dict)
    mlflow_uri: str = ""
    prefect_api: str = ""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("story")
    settings = CONFIG | {
        "store": str(directory / "store"),
        "infra": {"kind": "local", "state": str(directory / "state")},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(settings))
    told = Story(directory, open_run(load_config(directory / "run.yaml")))
    try:
        _interrupt(told)
        _kill_engine_and_run(told)
        _finish(told)
        _again(told)
        yield told
    finally:
        _command(told, "down", "--state", str(directory / "state"), check=False)
        for process in _left(told):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(process.split()[0])).kill()


def test_ctrl_c_ends_everything_and_says_how_to_go_on(story: Story) -> None:
    assert story.interrupted_code == 130
    assert "Run the same command again to resume" in story.interrupted_output
    assert story.left_after_interrupt == []


def test_the_services_of_a_killed_run_end_by_themselves(story: Story) -> None:
    assert story.left_after_kill == []


def test_a_continued_run_does_no_complete_stage_again(story: Story) -> None:
    assert story.reported_at_interrupt >= 1
    for iteration in range(1, story.reported_at_interrupt + 1):
        for kind in ("collect", "validate", "train"):
            reference = story.run.stage(iteration, kind).reference()
            assert reference is not None
            assert read_manifest(reference).attempt == 1, (iteration, kind)
    assert read_manifest(story.run.stage(ITERATIONS, "train").reference()).attempt == 1, "killed behind it"


def test_a_killed_engine_comes_back_and_the_run_goes_on(story: Story) -> None:
    assert story.killed_engines >= 1
    assert story.summary["iterations"] == ITERATIONS


def test_every_iteration_is_complete_and_its_ledger_balances(story: Story) -> None:
    for iteration in range(1, ITERATIONS + 1):
        for kind in ("refit", "collect", "validate", "train", "report"):
            assert story.run.stage(iteration, kind).reference() is not None, (iteration, kind)
        reference = story.run.stage(iteration, "validate").reference()
        counts = read_manifest(reference).counts
        outcomes = sum(counts[name] for name in ("completed", "truncated", "failed", "masked", "omitted"))
        assert counts["requested"] == outcomes == 16
        ids = read_table(story.run.stage(iteration, "collect").reference(), "rollouts").column("rollout_id").to_pylist()
        assert len(ids) == len(set(ids)) == 16
    assert story.run.checkpoint_versions() == [0, ITERATIONS - 1, ITERATIONS]


def test_each_iteration_was_answered_by_the_version_before_it(story: Story) -> None:
    for iteration in range(1, ITERATIONS + 1):
        turns = read_table(story.run.stage(iteration, "collect").reference(), "turns")
        assert set(turns.column("policy_version").to_pylist()) == {iteration - 1}


def test_engine_and_trainer_agree_on_log_probabilities(story: Story) -> None:
    for iteration in range(1, ITERATIONS + 1):
        metrics = read_manifest(story.run.stage(iteration, "train").reference()).metrics
        assert metrics["train/logprob_abs_diff_max"] < 1e-4


def test_the_summary_tells_what_was_reached_and_what_it_took(story: Story) -> None:
    summary = story.summary
    assert summary["iterations"] == ITERATIONS
    for moment in ("before", "after"):
        assert 0 <= summary["evaluation"][moment]["reward_mean"] <= 1
        assert summary["evaluation"][moment]["ledger"]["requested"] == 8
    assert [evaluation["version"] for evaluation in summary["evaluation"]["all"]] == EVALUATED
    assert summary["wall_seconds"] > 0
    assert {"refit", "collect", "validate", "train", "checkpoint"} <= summary["stage_seconds"].keys()
    assert summary["ledger"]["requested"] == 16 * ITERATIONS
    assert "Held-out reward" in story.finished_output
    assert (story.directory / "store/runs/story/learning-curve.png").read_bytes().startswith(b"\x89PNG")


def test_starting_a_finished_run_shows_the_summary_and_starts_nothing(story: Story) -> None:
    assert "is finished" in story.again_output
    assert "Held-out reward" in story.again_output
    assert story.started_again == 0


def test_the_stores_files_are_plain_parquet(story: Story) -> None:
    place = story.directory / "store/runs/story/iterations/000001/collect"
    rollouts = ds.dataset([str(path) for path in place.glob("rollouts-*.parquet")]).to_table()
    assert {"rollout_id", "reward", "messages", "status"} <= set(rollouts.column_names)
    assert '"function_call"' in "".join(rollouts.column("messages").to_pylist())


def test_mlflow_has_one_run_with_each_iteration_once(story: Story) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(story.mlflow_uri)
    experiment = client.get_experiment_by_name("roundhouse")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert sorted(point.step for point in history) == list(range(1, ITERATIONS + 1))
    assert {"evaluation/reward/mean", "time/collect", "overhead/total"} <= run.data.metrics.keys()
    assert run.data.params["rollout.group_size"] == "4"
    inputs = {each.dataset.name for each in run.inputs.dataset_inputs}
    assert {"rollouts-000001", "sequences-000004"} <= inputs
    artifacts = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert {"learning-curve.png", "config.yaml", "conversations"} <= artifacts
    unknown = [name for name in run.data.metrics if meaning_of(name) is None and not name.startswith("system/")]
    assert unknown == [], "docs/metrics.md does not say what they mean"


def test_mlflow_has_traces_of_evaluated_rollouts_and_a_version_of_each_evaluated_checkpoint(story: Story) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(story.mlflow_uri)
    experiment = client.get_experiment_by_name("roundhouse")
    traces = client.search_traces(locations=[experiment.experiment_id], max_results=100)
    # MLflow's client sends spans before the trace's tags: the kill may have come between, and the trace was written again
    traces = [trace for trace in traces if "roundhouse.rollout" in trace.info.tags]
    shown = [(trace.info.tags["roundhouse.iteration"], trace.info.tags["roundhouse.rollout"]) for trace in traces]
    assert len(shown) == len(set(shown)) == len(EVALUATED) * story.run.config.tracking.conversations
    assert {span.span_type for trace in traces for span in trace.data.spans} >= {"AGENT", "CHAT_MODEL", "EVALUATOR"}
    versions = client.search_model_versions("name = 'story'")
    assert sorted(int(each.tags["roundhouse.policy_version"]) for each in versions) == EVALUATED
    promoted = client.get_model_version_by_alias("story", "promoted")
    assert int(promoted.tags["roundhouse.policy_version"]) == promoted_version(story.run)


def test_prefect_shows_named_runs_and_artifacts(story: Story) -> None:
    import httpx

    auth = httpx.BasicAuth(*services.status(story.directory / "state/services").prefect_auth_string.split(":"))

    def ask(what: str, body: dict) -> list[dict]:
        return (
            httpx.post(f"{story.prefect_api}/{what}/filter", json=body, auth=auth, timeout=30).raise_for_status().json()
        )

    flow_runs = {each["name"]: each for each in ask("flow_runs", {"limit": 50})}
    assert flow_runs["story iteration 0004"]["state_type"] == "COMPLETED"
    assert "run:story" in flow_runs["story iteration 0004"]["tags"]
    task_runs = {each["name"] for each in ask("task_runs", {"limit": 200})}
    assert {"collect 4", "validate 4", "train 4", "checkpoint 4", "refit to version 3"} <= task_runs
    keys = {each["key"] for each in ask("artifacts", {"limit": 200})}
    assert {"story-progress", "story-iteration", "story-mlflow", "story-summary"} <= keys


def _interrupt(told: Story) -> None:
    """Ctrl-C in iteration 2 or later."""
    process = _start(told)
    until(
        lambda: told.run.is_reported(1),
        "two iterations",
        process=process,
        evidence=lambda: _output(process),
        seconds=400,
    )
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    told.interrupted_code, told.interrupted_output = process.returncode, output
    told.left_after_interrupt = _gone(told)
    told.reported_at_interrupt = max(k for k in range(ITERATIONS) if told.run.is_reported(k))


def _kill_engine_and_run(told: Story) -> None:
    """Kill the engine in the next iteration; the run continues. Then kill its process before it commits the last report."""
    plan = Plan((BEFORE_THE_LAST_REPORT,), told.directory / "struck")
    plan.save(told.directory / "plan.json")
    process = _start(told, plan=told.directory / "plan.json")
    refit = told.run.stage(told.reported_at_interrupt + 1, "refit")
    until(
        lambda: refit.reference() is not None,
        "the next refit",
        process=process,
        evidence=lambda: _output(process),
        seconds=400,
    )
    told.killed_engines = _kill_engine(told)
    output, _ = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL, output
    told.left_after_kill = _gone(told)


def _finish(told: Story) -> None:
    """To the end."""
    process = _start(told)
    told.finished_output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, told.finished_output
    told.summary = json.loads(
        _command(told, "runs", "show", "story", "--store", str(told.directory / "store"), "--json")
    )
    told.mlflow_uri = re.search(r"MLflow +(http://\S+?)(/#\S*)?$", told.finished_output, re.M)[1]
    told.prefect_api = re.search(r"Prefect +(http://\S+)", told.finished_output)[1] + "/api"


def _kill_engine(told: Story) -> int:
    """SIGKILL of the replica and of the engine's own process; how many there were."""
    names = ("ray::ServeReplica", "VLLM::EngineCore")
    killed = 0
    for line in _left(told):
        with contextlib.suppress(psutil.NoSuchProcess):  # others of the story come and go
            process = psutil.Process(int(line.split()[0]))
            if " ".join(process.cmdline()).startswith(names):
                process.kill()
                killed += 1
    return killed


def _again(told: Story) -> None:
    before = _started(told)
    told.again_output = _command(told, "train", str(told.directory / "run.yaml"))
    told.started_again = _started(told) - before


def _started(told: Story) -> int:
    """Return the number of starts of a service."""
    logs = (told.directory / "state/services/logs").glob("*.log")
    return sum(log.read_text(errors="replace").count("--- started ") for log in logs)


def _start(told: Story, plan: Path | None = None) -> subprocess.Popen[str]:
    """Start the command; with a plan, under the layer that kills it at the planned point."""
    command = [ROUNDHOUSE] if plan is None else [sys.executable, "-m", "tests.chaos.planted"]
    return subprocess.Popen(
        [*command, "train", str(told.directory / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=_environment() | ({} if plan is None else {PLAN_VARIABLE: str(plan)}),
        start_new_session=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    """Stop the command and return its whole output."""
    process.kill()
    return process.communicate()[0]


def _command(told: Story, *arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        [ROUNDHOUSE, *arguments], capture_output=True, text=True, env=_environment(), timeout=120, check=check
    )
    return done.stdout


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "AWS_"))}


def _gone(told: Story, seconds: float = 45) -> list[str]:
    """Return the remains after a while."""
    deadline = time.monotonic() + seconds
    while (left := _left(told)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def _left(told: Story) -> list[str]:
    """Return the processes with the story's directory in their environment or command line."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(str(told.directory / "state") in word for word in words):
            found.append(f"{process.pid} {' '.join(words)[:120]}")
    return found
