"""MLflow's view of a run: traces of rollouts, versions with their data, no duplicates."""

from __future__ import annotations

import getpass
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from roundhouse.config.loading import parse_config
from roundhouse.stages.checkpoint import retain
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.stages.promotion import answer, promote
from roundhouse.stages.report import report_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.tracking import mlflow as notebook
from roundhouse.tracking.mlflow import MlflowRun, open_mlflow_run
from roundhouse.tracking.traces import TraceWriter, model_calls
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn
from tests.stages.test_promotion import evaluated

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def run(tmp_path, database: str) -> Run:
    tracking = {"uri": database, "experiment": tmp_path.name, "system_metrics": False, "labels": {"team": "search"}}
    return open_run(parse_config({"run_id": tmp_path.name, "store": str(tmp_path / "store"), "tracking": tracking}))


@pytest.fixture
def page(run: Run, database: str) -> Iterator[MlflowRun]:
    found = open_mlflow_run(run, database)
    yield found
    found.finish()


def writer(run: Run, page: MlflowRun, database: str) -> TraceWriter:
    client = MlflowClient(database)
    experiment = client.get_run(page.mlflow_run_id).info.experiment_id
    return TraceWriter(client, experiment, page.mlflow_run_id, run.uid)


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
    run: Run, page: MlflowRun, database: str
):
    writer(run, page, database).write([rollout(0)], 3)
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
    assert trace.data.request == '{"messages": [{"role": "user", "content": "2*3?"}]}'
    assert json.loads(trace.data.response) == "6"
    assert trace.info.tags["roundhouse.iteration"] == "3"
    (feedback,) = trace.info.assessments
    assert (feedback.name, feedback.feedback.value) == ("reward", 1.0)


def test_a_failed_rollout_is_an_error_without_any_reward(run: Run, page: MlflowRun, database: str):
    failed = rollout(
        0, status=Status.FAILED, reward=None, failure_kind=FailureKind.INFRA, failure_code="engine_timeout"
    )
    writer(run, page, database).write([failed], 1)
    (trace,) = traces(run, database)
    assert trace.info.status == "ERROR"
    assert json.loads(trace.data.response) == "(failed: engine_timeout)"
    assert not trace.info.assessments
    assert "verify" not in {span.name for span in trace.data.spans}


def test_traces_of_an_iteration_are_written_once_however_often_it_is_reported(run: Run, page: MlflowRun, database: str):
    writer(run, page, database).write([rollout(0)], 1)
    again = writer(run, open_mlflow_run(run, database), database)
    again.write([rollout(0), rollout(1)], 1)
    again.write([rollout(0)], 2)
    assert sorted(trace.info.tags["roundhouse.rollout"] for trace in traces(run, database)) == ["t/0", "t/0", "t/1"]


def versions(run: Run, database: str) -> dict[str, Any]:
    """The registered versions, by policy version."""
    found = MlflowClient(database).search_model_versions(f"name = '{run.run_id}'")
    assert len({each.tags["roundhouse.policy_version"] for each in found}) == len(found)
    return {each.tags["roundhouse.policy_version"]: each for each in found}


def test_evaluated_checkpoints_are_model_versions_and_the_alias_follows_the_store(
    run: Run, page: MlflowRun, database: str
):
    client = MlflowClient(database)
    for version, rewards in ((0, [0.0] * 30), (1, [1.0] * 30), (2, [1.0] * 30)):
        evaluated(run, version, rewards)
        promote(run, version)
        report_iteration(run, version)
        page.log_missing_iterations()
    assert sorted(versions(run, database)) == ["0", "1", "2"]
    promoted = client.get_model_version_by_alias(run.run_id, "promoted")
    assert promoted.tags["roundhouse.policy_version"] == "1"
    checkpoint = run.checkpoint(1).reference()
    assert promoted.tags["roundhouse.checkpoint"] == checkpoint.uri
    assert promoted.tags["roundhouse.checkpoint_digest"] == checkpoint.digest
    assert promoted.tags["roundhouse.heldout_reward"] == "1.0000"
    assert checkpoint.uri.removeprefix("file://") in promoted.description


@pytest.mark.parametrize("is_late", [False, True], ids=["registered before", "registered after"])
def test_a_version_whose_checkpoint_retention_has_deleted_says_so(
    run: Run, page: MlflowRun, database: str, is_late: bool
):
    for version in range(4):
        evaluated(run, version, [1.0])
        report_iteration(run, version)
    if not is_late:
        page.log_missing_iterations()
    deleted = [str(version) for version in retain(run, 4)]
    assert deleted
    page.log_missing_iterations()
    assert sorted(versions(run, database)) == ["0", "1", "2", "3"]
    page.follow_store()
    page.follow_store()
    said = {name: each.description.count("Deleted from the store") for name, each in versions(run, database).items()}
    marked = {name for name, each in versions(run, database).items() if "roundhouse.checkpoint_state" in each.tags}
    assert said == {name: int(name in deleted) for name in said}
    assert marked == set(deleted)


def test_a_persons_answer_reaches_the_version_and_the_run_from_the_store_alone(tmp_path, database: str):
    settings = {
        "run_id": "asked",
        "store": str(tmp_path),
        "evaluation": {"approval": {"required": True}},
        "tracking": {"uri": database, "experiment": tmp_path.name, "system_metrics": False},
    }
    run = open_run(parse_config(settings))
    page = open_mlflow_run(run, database)
    for version, rewards in ((0, [0.0] * 30), (1, [1.0] * 30)):
        evaluated(run, version, rewards)
        promote(run, version)
        report_iteration(run, version)
    page.log_missing_iterations()
    answer(run, 1, True, "fine", by="Ada")
    page.finish()
    assert versions(run, database)["1"].tags["roundhouse.approval"] == "approved by Ada: fine"
    promoted = MlflowClient(database).get_model_version_by_alias("asked", "promoted")
    assert promoted.tags["roundhouse.policy_version"] == "1"
    tags = MlflowClient(database).get_run(page.mlflow_run_id).data.tags
    assert tags["roundhouse.approval.1"] == "approved by Ada: fine"


def test_the_page_of_a_run_says_who_started_what_and_where_to_look_first(run: Run, page: MlflowRun, database: str):
    client = MlflowClient(database)
    tags = client.get_run(page.mlflow_run_id).data.tags
    assert tags["mlflow.user"] == getpass.getuser()
    assert tags["mlflow.source.name"] == "roundhouse"
    assert tags["team"] == "search"
    named = re.findall(r"`([a-z_]+/[a-z_]+)`", tags["mlflow.note.content"])
    assert len(named) > 3
    assert [name for name in named if meaning_of(name) is None] == []
    experiment = client.get_experiment_by_name(run.config.tracking.experiment)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_page_that_was_only_half_described_is_described_when_it_is_opened_again(
    run: Run, database: str, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as dying:
        dying.setattr(MlflowClient, "log_text", lambda *_, **__: (_ for _ in ()).throw(ConnectionError()))
        with pytest.raises(ConnectionError):
            open_mlflow_run(run, database)
    page = open_mlflow_run(run, database)
    assert [each.path for each in MlflowClient(database).list_artifacts(page.mlflow_run_id)] == ["config.yaml"]


def test_the_machines_load_is_logged_and_its_curve_goes_on_after_a_restart(
    tmp_path, database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notebook, "SYSTEM_METRICS_SECONDS", 0.2)
    tracking = {"uri": database, "experiment": tmp_path.name}
    run = open_run(parse_config({"run_id": "load", "store": str(tmp_path / "store"), "tracking": tracking}))
    client, steps = MlflowClient(database), []
    for _ in range(2):
        page = open_mlflow_run(run, database)
        page.monitor_system()
        time.sleep(1.5)
        page.finish()
        points = client.get_metric_history(page.mlflow_run_id, "system/system_memory_usage_megabytes")
        steps.append([point.step for point in points])
    assert 0 < len(steps[0]) < len(steps[1])
    assert sorted(set(steps[1])) == sorted(steps[1]), "a restart must not draw over the curve"
