"""MLflow may be slow to start, hang, fail or die: a run waits for none of it, and missing data is written later, once."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from rich.console import Console
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.consent import unnamed_code
from roundhouse.config.loading import parse_config
from roundhouse.console import print_summary
from roundhouse.errors import ConfigError
from roundhouse.health.errors import ErrorReporter
from roundhouse.health.heartbeat import Heartbeat, read_beat, state_of
from roundhouse.imports import load_class
from roundhouse.infra.consents import record_consent
from roundhouse.stages.report import report_iteration, summarize
from roundhouse.store.run import Run, open_run
from roundhouse.tracking import traces
from roundhouse.tracking import tracker as tracking
from roundhouse.tracking.mlflow import FIRST_LOOK, page_of, table_url
from roundhouse.tracking.sinks import Sinks
from roundhouse.tracking.traces import UID_TAG
from roundhouse.tracking.tracker import Tracker, catch_up, open_tracker
from roundhouse_tasks import report as tasks
from tests.ports import free_port
from tests.stages.test_promotion import evaluated
from tests.tracking.served import FaultyServer, faulty_server
from tests.waiting import until

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    with pytest.MonkeyPatch.context() as patch, faulty_server(tmp_path_factory.mktemp("mlflow"), patch) as found:
        yield found


@pytest.fixture
def server(shared_server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    """It answers; clients do not ask again by themselves."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")
    monkeypatch.setattr(tracking, "PAUSES", (0.05,))
    shared_server.stop()
    shared_server.start()
    shared_server.refused.clear()
    return shared_server


def finished(tracker: Tracker, patience_seconds: float) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "PATIENCE_SECONDS", patience_seconds)
        return tracker.finish()


def a_run(tmp_path, uri: str, conversations: int = 1) -> Run:
    settings = {"uri": uri, "experiment": tmp_path.name, "system_metrics": False, "conversations": conversations}
    return open_run(parse_config({"run_id": tmp_path.name, "store": str(tmp_path / "store"), "tracking": settings}))


def iteration(run: Run, number: int) -> None:
    """A whole iteration, as far as the store is concerned."""
    evaluated(run, number, [1.0, 0.0])
    report_iteration(run, number)


def tracked(run: Run) -> Tracker:
    found = open_tracker(run)
    assert found is not None
    return found


def logged(run: Run) -> list[int]:
    """The steps that MLflow has, with every point as often as it is there."""
    client = MlflowClient(run.config.tracking.uri)
    experiment = client.get_experiment_by_name(run.config.tracking.experiment)
    [found] = client.search_runs([experiment.experiment_id])
    steps = [point.step for point in client.get_metric_history(found.info.run_id, "evaluation/reward/mean")]
    written = client.search_traces(locations=[experiment.experiment_id], include_spans=False)
    assert sorted(int(trace.info.tags["roundhouse.iteration"]) for trace in written) == sorted(steps)
    return steps


def test_a_server_that_never_comes_up_costs_a_warning_with_the_command_that_makes_up_for_it(
    tmp_path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = a_run(tmp_path, f"http://127.0.0.1:{free_port()}")
    tracker = tracked(run)
    for number in (0, 1):
        iteration(run, number)
        tracker.update()
    with caplog.at_level(logging.WARNING):
        assert not finished(tracker, 0.05)
    assert f"roundhouse runs track {run.run_id}" in caplog.text
    assert tracker.url is None
    later = a_run(tmp_path, server.url)  # the address of tracking may differ between two starts
    assert catch_up(later)
    assert logged(later) == [0, 1]


def test_a_server_that_hangs_holds_up_neither_an_iteration_nor_the_end(tmp_path, server: FaultyServer):
    server.fault = lambda path: "hang"
    run = a_run(tmp_path, server.url)
    tracker = tracked(run)
    assert server.refused.wait(60)
    for number in (0, 1):
        iteration(run, number)
        tracker.update()
        tracker.tag({"roundhouse.health": "healthy"})
        tracker.log_gauges({"activity/rollouts": 1.0})
    assert not finished(tracker, 0.05), "it has not answered a single request"
    server.stop()
    server.start()
    assert catch_up(run)
    assert logged(run) == [0, 1]


@pytest.mark.parametrize("fault", ["500", "garbage"])
def test_a_server_that_answers_with_errors_gets_everything_once_it_works(tmp_path, server: FaultyServer, fault: str):
    server.fault = lambda path: fault
    run = a_run(tmp_path, server.url)
    tracker = tracked(run)
    iteration(run, 0)
    tracker.update()
    assert server.refused.wait(60)
    iteration(run, 1)
    server.fault = lambda path: ""
    assert finished(tracker, 60)
    assert logged(run) == [0, 1]


@pytest.mark.parametrize("at", ["runs/log-batch", "artifacts/", "model-versions/create", "traces", "runs/create"])
def test_a_server_that_dies_in_the_middle_gets_the_rest_when_it_is_back_and_nothing_twice(
    tmp_path, server: FaultyServer, at: str
):
    run = a_run(tmp_path, server.url)
    iteration(run, 0)
    server.fault = lambda path: "die" if at in path else ""
    tracker = tracked(run)
    assert server.refused.wait(60)
    iteration(run, 1)
    tracker.update()
    server.stop()
    server.start()
    assert finished(tracker, 60)
    assert logged(run) == [0, 1]


def test_a_tag_that_the_server_failed_at_is_set_when_it_works(tmp_path, server: FaultyServer):
    run = a_run(tmp_path, server.url)
    tracker = tracked(run)
    until(lambda: tracker.url, "an open page")
    server.fault = lambda path: "500" if "set-tag" in path else ""
    tracker.tag({"colour": "green"})
    assert server.refused.wait(60)
    server.fault = lambda path: ""
    assert finished(tracker, 60)
    page = page_of(MlflowClient(run.config.tracking.uri), run)
    assert page is not None
    assert page.data.tags["colour"] == "green"


@pytest.mark.parametrize("deleted", ["experiment", "run"])
def test_what_is_deleted_in_mlflow_is_restored_by_the_run_and_by_the_next_start(
    tmp_path, server: FaultyServer, deleted: str
):
    run = a_run(tmp_path, server.url)
    client = MlflowClient(server.url)

    def delete() -> None:
        experiment = client.get_experiment_by_name(run.config.tracking.experiment)
        if deleted == "experiment":
            client.delete_experiment(experiment.experiment_id)
        else:
            [page] = client.search_runs([experiment.experiment_id])
            client.delete_run(page.info.run_id)

    tracker = tracked(run)
    iteration(run, 1)
    tracker.update()
    assert tracker.settle()
    delete()
    iteration(run, 2)
    assert finished(tracker, 60)
    assert logged(run) == [1, 2]
    delete()
    iteration(run, 3)
    catch_up(run)
    assert logged(run) == [1, 2, 3]


def test_no_name_and_no_number_of_an_iteration_keeps_it_from_the_page(
    tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
):
    """Names that MLflow refuses, two that become one, an evaluation without any reward, more traces than a page of them."""
    monkeypatch.setattr(traces, "TRACES_A_PAGE", 1)
    run = a_run(tmp_path, server.url, conversations=3)
    evaluated(run, 0, [None, None, None])
    named = {
        "pass@1": 1.0,
        "f1": 2.0,
        "f%": 3.0,
        "f=": 4.0,
        "f_": 5.0,
        "a//./b,": 6.0,
        "../..": 7.0,
        "...c": 8.0,
        "l" * 251: 9.0,
    }
    run.begin(run.stage(0, "collect"), policy_version=0).commit(metrics=named)
    report_iteration(run, 0)
    iteration(run, 1)
    assert finished(tracked(run), 60)
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name(tmp_path.name).experiment_id
    [page] = client.search_runs([experiment])
    assert page.data.metrics.items() >= {"pass_1": 1.0, "f1": 2.0, "f_": 5.0, "a/b_": 6.0, "_": 7.0, "_c": 8.0}.items()
    assert {3.0, 4.0, 9.0} <= set(page.data.metrics.values())
    assert [point.step for point in client.get_metric_history(page.info.run_id, "iteration")] == [0, 1]
    there = client.search_traces(locations=[experiment], include_spans=False)
    assert sorted(trace.info.tags["roundhouse.iteration"] for trace in there) == ["0", "0", "0", "1", "1"]


@pytest.mark.smoke("MLflow")
def test_a_resumed_run_that_is_finished_writes_what_mlflow_lacks(tmp_path, server: FaultyServer):
    server.fault = lambda path: "500"
    run = a_run(tmp_path, server.url)
    run = open_run(run.config.model_copy(update={"iterations": 1}))
    for number in (0, 1):
        iteration(run, number)
    summary = summarize(run) | {"iterations": 1, "mlflow_complete": finished(tracked(run), 0.05)}
    run.write_summary(summary)
    # The resumed run is another process: nothing of the first one writes any more.
    until(lambda: all(thread.name != "tracking" for thread in threading.enumerate()), "the end of the first tracker")
    server.fault = lambda path: ""
    found = tasks.finished_summary(run)
    assert found is not None
    assert found["mlflow_complete"] is True
    assert found["mlflow_url"].startswith(server.url)
    assert logged(run) == [0, 1]


@pytest.mark.parametrize(
    ("error", "status", "state"),
    [(ValueError("a stage failed"), "FAILED", "failed"), (KeyboardInterrupt(), "KILLED", "stopped")],
    ids=["failed", "interrupted"],
)
def test_a_run_that_ends_early_writes_what_it_has_and_its_page_shows_the_end(
    tmp_path, server: FaultyServer, error: BaseException, status: str, state: str, monkeypatch: pytest.MonkeyPatch
):
    def threads_of_trackers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "tracking"}

    before = threads_of_trackers()
    run = a_run(tmp_path, server.url)
    seen: list[Tracker | None] = []

    def training() -> None:
        with tasks.tracked(run), Heartbeat(run.location, ErrorReporter(), 60.0):
            iteration(run, 0)
            seen.append(tasks.opened_tracker(run))
            seen[0].update()
            until(lambda: seen[0].url is not None, "the page")
            raise error

    monkeypatch.setattr(tasks, "INTERRUPTED_SECONDS", 60.0)
    with pytest.raises(type(error)):
        training()
    assert logged(run) == [0]
    assert page_status(run) == status
    assert state_of(run) == state
    until(lambda: not threads_of_trackers() - before, "the end of the tracker's thread")


def page_status(run: Run) -> str:
    page = page_of(MlflowClient(run.config.tracking.uri), run)
    assert page is not None
    return page.info.status


def test_the_page_of_a_killed_run_is_closed_by_the_next_command_and_only_once(
    tmp_path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROUNDHOUSE_STATE", str(tmp_path))
    run = a_run(tmp_path, server.url)
    iteration(run, 0)
    tracker = tracked(run)
    assert tracker.settle()
    tracker.stop()
    with Heartbeat(run.location, ErrorReporter(), 60.0):
        until(lambda: read_beat(run.location) is not None, "the first heartbeat")
        killed = run.location.read("health.json")
    run.location.write("health.json", killed)
    assert (page_status(run), state_of(run)) == ("RUNNING", "crashed")

    def listed() -> str:
        return CliRunner().invoke(app, ["runs", "list", "--store", run.config.store]).stderr

    assert listed() == "", "nobody accepted the server that the store names"
    record_consent(run.config)
    server.fault = lambda path: "500"
    assert listed() == ""
    server.fault = lambda path: ""
    assert "MLflow now shows how these runs ended" in listed()
    assert page_status(run) == "FAILED"
    page = page_of(MlflowClient(server.url), run)
    assert page.info.end_time == int(read_beat(run.location).written_at * 1000)
    server.fault = lambda path: "500"
    server.refused.clear()
    assert listed() == ""
    assert not server.refused.is_set(), "the server is not asked again"


def test_the_experiment_has_a_view_of_its_table_with_the_metrics_that_matter(tmp_path, server: FaultyServer):
    """MLflow by itself shows no metric there. Its page reads a view from the tag that its address names."""
    run = a_run(tmp_path, server.url)
    iteration(run, 0)
    tracker = tracked(run)
    assert finished(tracker, 60)
    assert tracker.url is not None
    address, _, key = table_url(tracker.url).partition("/runs?viewStateShareKey=")
    experiment = MlflowClient(server.url).get_experiment(address.rsplit("/", 1)[1])
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
    assert view["selectedColumns"] == [f"metrics.`{name}`" for name in FIRST_LOOK]
    assert key in experiment.tags["mlflow.note.content"]


def test_a_deleted_run_leaves_nothing_in_mlflow_and_other_runs_stay(
    tmp_path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
):
    def made(name: str) -> Run:
        settings = {"uri": server.url, "experiment": tmp_path.name, "system_metrics": False, "register_as": "shared"}
        run = open_run(parse_config({"run_id": name, "store": str(tmp_path / "store"), "tracking": settings}))
        iteration(run, 0)
        assert catch_up(run)
        return run

    monkeypatch.setenv("ROUNDHOUSE_STATE", str(tmp_path))
    deleted, other = made("deleted"), made("other")
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name(tmp_path.name).experiment_id
    told = CliRunner().invoke(
        app, ["runs", "delete", "deleted", "--yes", "--trust-store", "--store", deleted.config.store]
    )
    assert "MLflow: deleted" in told.stdout, told.stdout
    assert [page.info.run_name for page in client.search_runs([experiment])] == ["other"]
    others = client.search_traces(locations=[experiment], include_spans=False)
    assert {trace.info.tags[UID_TAG] for trace in others} == {other.uid}
    assert {each.tags[UID_TAG] for each in client.search_model_versions("name = 'shared'")} == {other.uid}
    CliRunner().invoke(app, ["runs", "delete", "other", "--yes", "--trust-store", "--store", other.config.store])
    assert client.search_registered_models("name = 'shared'") == []
    gone = made("gone")
    server.fault = lambda path: "500"
    told = CliRunner().invoke(app, ["runs", "delete", "gone", "--yes", "--trust-store", "--store", gone.config.store])
    assert told.exit_code == 0
    assert f"MLflow: {server.url} refused" in told.stdout


OWN_SINK = """
class Keeps:
    taken = []
    def __init__(self, run):
        self.run_id = run.run_id
    def log_iteration(self, iteration, metrics):
        self.taken.append((self.run_id, iteration, metrics["reward/mean"]))
        if iteration == 1:
            raise ValueError("not this one")
class Refuses(Keeps):
    def __init__(self, run):
        raise OSError("no such host")
class Nothing: ...
"""


def test_each_sink_of_the_list_gets_every_iteration_and_one_that_fails_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_sink.py").write_text(OWN_SINK)
    own = f"{tmp_path / 'own_sink.py'}:Keeps"

    def opened(*sinks: str) -> Run:
        tree = {"run_id": "listed", "store": str(tmp_path / "store"), "infra": {"state": str(tmp_path / "state")}}
        return open_run(parse_config(tree | {"tracking": {"sinks": sinks}}))

    run = opened(own, "json_lines")
    assert open_tracker(run) is None, "MLflow is not in the list"
    state = {"infra.state": str(tmp_path / "state")}
    assert unnamed_code(run.config, []) == state | {"tracking.sinks": f"['{own}', 'json_lines']"}
    assert unnamed_code(opened("mlflow", "json_lines").config, []) == state
    for number in (0, 1):
        run.begin(run.checkpoint(number), policy_version=number).commit()
        run.begin(run.stage(number, "collect"), policy_version=number).commit(metrics={"reward/mean": number / 2})
        report_iteration(run, number)
    shown: list[str] = []
    monkeypatch.setattr("roundhouse.tracking.sinks.announce", lambda event, name, text: shown.append(text))
    sinks = Sinks(run)
    sinks.update()
    sinks.update()
    taken = load_class(own, object, "tracking.sinks").taken  # type: ignore[attr-defined]
    assert taken == [("listed", 0, 0.0), ("listed", 1, 0.5)]
    assert "Keeps did not take iteration 1: ValueError('not this one')" in caplog.text
    assert [text for text in shown if "did not take iteration 1" in text], "at the terminal, too"
    file = tmp_path / "state/metrics/listed.jsonl"
    file.write_text(file.read_text()[:-5])  # as a kill leaves it
    Sinks(opened("json_lines", own.replace("Keeps", "Refuses"))).update()
    assert "Refuses cannot be opened, and this run continues without it: OSError('no such host')" in caplog.text
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["iteration"], line["reward/mean"]) for line in lines] == [(0, 0.0), (1, 0.5)], "after a restart too"
    with pytest.raises(ConfigError, match="does not define log_iteration"):
        Sinks(opened(own.replace("Keeps", "Nothing")))
    known = "the sinks are mlflow, json_lines"
    for wrong, told in ((["wanbd"], known), (["mlflow", "mlflow"], "named twice")):
        with pytest.raises(ConfigError, match=told):
            opened(*wrong)


@pytest.mark.parametrize(
    ("rewards", "told"),
    [([None, None], "– → –  (– held-out tasks"), ([None, 0.5], "– → 0.500 ± 0.000  (2 held-out tasks")],
    ids=["never", "at first"],
)
def test_an_evaluation_without_a_reward_is_shown_by_a_dash_and_left_out_of_the_plot(
    rewards: list[float | None], told: str, tmp_path: Path
) -> None:
    run = open_run(parse_config({"run_id": "one", "store": str(tmp_path / "store")}))
    for version, reward in enumerate(rewards):
        evaluated(run, version, [reward, reward])
    for command in ("list", "list --sort reward", "show one"):
        done = CliRunner().invoke(app, ["runs", *command.split(), "--store", run.config.store], env={"COLUMNS": "120"})
        assert done.exit_code == 0, done.exception
    assert told in done.stdout
    summary = summarize(run)
    tracking.plot_run(run, summary, tmp_path / "plot.png")
    assert told.split("  ")[0] in tasks._summary_markdown(summary)
    for stored in summary["evaluation"]["all"]:  # as it is in stores: without the fields
        for key in [key for key, value in stored.items() if value is None]:
            del stored[key]
    screen = Console(file=io.StringIO(), width=120)
    print_summary(screen, summary, {}, [])
    assert told in screen.file.getvalue()
