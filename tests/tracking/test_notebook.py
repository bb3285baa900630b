"""What MLflow shows of a run: traces of what happened, versions with their data, nothing twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from roundhouse.config.loading import parse_config
from roundhouse.stages.promotion import promote
from roundhouse.stages.report import report_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import read_manifest
from roundhouse.tracking import mlflow as notebook
from roundhouse.tracking.catalogue import meaning_of
from roundhouse.tracking.mlflow import Tracker, open_tracker
from roundhouse.tracking.traces import model_calls
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn
from tasks import report as report_tasks
from tests.stages.test_promotion import evaluated


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def run(tmp_path, database: str) -> Run:
    tracking = {"uri": database, "experiment": tmp_path.name, "system_metrics": False}
    return open_run(parse_config({"run_id": tmp_path.name, "store": str(tmp_path / "store"), "tracking": tracking}))


@pytest.fixture
def tracker(run: Run) -> Iterator[Tracker]:
    found = open_tracker(run)
    assert found is not None
    yield found
    found.finish()


def turn(number: int, seconds: float) -> Turn:
    return Turn(number, number - 1 if number else None, [1, 2], 2, "d", [3], [-0.5], 4, "stop", seconds)


def rollout(sample: int, **changes: Any) -> Rollout:
    items = [
        {"role": "user", "content": "2*3?"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "calc", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call", "name": "calc", "arguments": "[]", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "6"},
        {"type": "function_call_output", "call_id": "c2", "output": "error"},
        {"type": "message", "role": "assistant", "content": "6"},
    ]
    given = {
        "status": Status.COMPLETED,
        "reward": 1.0,
        "items": items,
        "turns": [turn(0, 0.5), turn(1, 0.25)],
        "started_at": 1000.0,
        "seconds": 2.0,
        "finish_reason": "stop",
    }
    return Rollout("t", sample, {"task_id": "t"}, "calculator", **(given | changes))


def traces(run: Run, database: str) -> list[Any]:
    client = MlflowClient(database)
    experiment = client.get_experiment_by_name(run.config.tracking.experiment)
    return client.search_traces(locations=[experiment.experiment_id])


def test_a_conversation_is_cut_where_the_policy_begins_to_speak_again():
    cut = model_calls(rollout(0).items)
    assert [[item.get("type") for item in call.said] for call in cut] == [
        ["reasoning", "function_call", "function_call"],
        ["message"],
    ]
    assert [len(call.answered) for call in cut] == [2, 0]


def test_a_rollout_becomes_a_trace_with_measured_seconds_its_tools_and_its_reward(
    run: Run, tracker: Tracker, database: str
):
    tracker.log_traces([rollout(0)], 3)
    (trace,) = traces(run, database)
    by_name = {span.name: span for span in trace.data.spans}
    seconds = {name: (span.end_time_ns - span.start_time_ns) / 1e9 for name, span in by_name.items()}
    assert seconds["t/0"] == pytest.approx(2.0, abs=0.01)
    assert seconds["model call 0"] == pytest.approx(0.5, abs=0.01)
    assert seconds["model call 1"] == pytest.approx(0.25, abs=0.01)
    tools = [span for span in trace.data.spans if span.span_type == "TOOL"]
    assert [span.outputs["output"] for span in tools] == ["6", "error"]
    assert all(span.parent_id == by_name["model call 0"].span_id for span in tools)
    assert by_name["model call 1"].attributes["policy_version"] == 4
    (feedback,) = trace.info.assessments
    assert (feedback.name, feedback.feedback.value) == ("reward", 1.0)


def test_a_failed_rollout_is_an_error_without_any_reward(run: Run, tracker: Tracker, database: str):
    failed = rollout(
        0, status=Status.FAILED, reward=None, failure_kind=FailureKind.INFRA, failure_code="engine_timeout"
    )
    tracker.log_traces([failed], 1)
    (trace,) = traces(run, database)
    assert trace.info.status == "ERROR"
    assert not trace.info.assessments
    assert "verify" not in {span.name for span in trace.data.spans}


def test_traces_of_an_iteration_are_written_once_however_often_it_is_reported(
    run: Run, tracker: Tracker, database: str
):
    tracker.log_traces([rollout(0)], 1)
    again = open_tracker(run)
    assert again is not None
    again.log_traces([rollout(0), rollout(1)], 1)
    again.log_traces([rollout(0)], 2)
    assert sorted(trace.info.tags["roundhouse.rollout"] for trace in traces(run, database)) == ["t/0", "t/0", "t/1"]


def test_evaluated_checkpoints_are_model_versions_and_the_alias_follows_the_store(
    run: Run, tracker: Tracker, database: str
):
    client = MlflowClient(database)
    for version, rewards in ((0, [0.0] * 30), (1, [1.0] * 30), (2, [1.0] * 30)):
        evaluated(run, version, rewards)
        promote(run, version)
        tracker.register(version)
        tracker.register(version)
    found = client.search_model_versions(f"name = '{run.run_id}'")
    assert sorted(each.tags["roundhouse.policy_version"] for each in found) == ["0", "1", "2"]
    promoted = client.get_model_version_by_alias(run.run_id, "promoted")
    assert promoted.tags["roundhouse.policy_version"] == "1"
    checkpoint = run.checkpoint(1).reference()
    assert promoted.tags["roundhouse.checkpoint"] == checkpoint.uri
    assert promoted.tags["roundhouse.checkpoint_digest"] == checkpoint.digest
    assert promoted.tags["roundhouse.heldout_reward"] == "1.0000"


def test_the_machines_load_is_logged_and_its_curve_goes_on_after_a_restart(
    tmp_path, database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notebook, "SYSTEM_METRICS_SECONDS", 0.2)
    tracking = {"uri": database, "experiment": tmp_path.name}
    run = open_run(parse_config({"run_id": "load", "store": str(tmp_path / "store"), "tracking": tracking}))
    client, steps = MlflowClient(database), []
    for _ in range(2):
        tracker = open_tracker(run)
        assert tracker is not None
        time.sleep(1.5)
        tracker.finish()
        points = client.get_metric_history(tracker.mlflow_run_id, "system/system_memory_usage_megabytes")
        steps.append([point.step for point in points])
    assert 0 < len(steps[0]) < len(steps[1])
    assert sorted(set(steps[1])) == sorted(steps[1]), "a restart must not draw over the curve"


def test_a_server_that_went_away_costs_a_warning_and_the_next_report_makes_up_for_it(
    run: Run, tracker: Tracker, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    evaluated(run, 0, [1.0])
    away = MlflowException("API request failed with exception: connection refused")
    with monkeypatch.context() as gone:
        gone.setattr(tracker._client, "log_batch", lambda *_, **__: (_ for _ in ()).throw(away))
        tracker.log_missing_iterations(0)
    assert "connection refused" in caplog.text
    client = MlflowClient(database)
    assert not client.get_metric_history(tracker.mlflow_run_id, "iteration")
    tracker.log_missing_iterations(0)
    tracker.log_missing_iterations(0)
    assert [point.step for point in client.get_metric_history(tracker.mlflow_run_id, "iteration")] == [0]
    assert client.get_run(tracker.mlflow_run_id).data.metrics["evaluation/reward_mean"] == 1.0


def test_the_report_says_how_long_the_run_has_waited_for_mlflow_since_the_one_before(
    run: Run, tracker: Tracker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(report_tasks._trackers, run.uid, tracker)
    evaluated(run, 0, [1.0])
    began = time.monotonic()
    tracker.log_missing_iterations(0)
    waited = time.monotonic() - began
    for iteration, (least, most) in ((1, (1e-4, waited)), (2, (0.0, 0.0))):
        run.begin(run.stage(iteration, "refit"), policy_version=0).commit()
        metrics = read_manifest(report_iteration(run, iteration, report_tasks._tracking_seconds(run))).metrics
        assert least <= metrics["overhead/mlflow"] <= most
    assert meaning_of("overhead/mlflow").meaning != meaning_of("overhead/refit").meaning
