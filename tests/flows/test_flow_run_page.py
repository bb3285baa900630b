"""Prefect's page of a flow run while it works, is paused or is stopped."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, tags
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.states import Cancelled, Scheduled, Suspended

from roundhouse.activity import announce
from roundhouse.config.loading import parse_config
from roundhouse.stages.metric_catalogue import meaning_of
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest
from roundhouse_flows import controls
from roundhouse_flows._prefect.delivery import deliver_queued_records
from roundhouse_flows._prefect.suspension import lasting_suspensions
from roundhouse_flows.prefect_log import ENDED, FIGURES, reports_to_prefect
from roundhouse_tasks import report, stages
from tests.flows.served import Served
from tests.sql.stores import write_run
from tests.waiting import until

pytestmark = pytest.mark.real

DIALOG_SECONDS = 300
"""What the page's *Suspend* proposes."""


def suspend(context: Any) -> Any:
    """Suspend as the page does; return the state that Prefect's observer receives."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(context.flow_run.id, Suspended(timeout_seconds=DIALOG_SECONDS), force=True)
        return client.read_flow_run(context.flow_run.id).state


@pytest.mark.parametrize("heard", [True, False], ids=["heard in a stage", "seen at a border"])
def test_a_run_that_a_person_suspends_on_the_page_rests_until_a_person_resumes_it(
    prefect_client: Served, heard: bool
) -> None:
    ids = []

    @flow(name="suspended")
    def suspended() -> None:
        context = FlowRunContext.get()
        ids.append(context.flow_run.id)
        with lasting_suspensions():
            state = suspend(context)
            if heard:
                context.flow_run_suspension_request.mark_requested(state)
                assert left(ids[0]) > timedelta(days=300), "before the stage at work has ended"
            raise Pause(state=state)

    with pytest.raises(Pause):
        suspended()
    assert left(ids[0]) > timedelta(days=300)


def left(flow_run: Any) -> timedelta:
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
    assert state.name == "Suspended"
    assert state.state_details.pause_reschedule
    return state.state_details.pause_timeout - datetime.now(UTC)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [DIALOG_SECONDS, -1], ids=["just suspended", "suspended while nothing was served"])
def test_a_suspended_run_whose_process_is_gone_does_not_fail_and_is_resumed(
    prefect_client: Served, seconds: int
) -> None:
    """Its process was killed before it heard of the suspension: Prefect failed it after 300 s."""
    suspended = Suspended(pause_expiration_time=datetime.now(UTC) + timedelta(seconds=seconds))
    with get_client(sync_client=True) as client:
        late = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
        evaluate = UUID(prefect_client.deployment("evaluate")["id"])
        made = client.create_flow_run_from_deployment(evaluate, parameters={"settings": {"run_id": "none"}}, state=late)
        client.set_flow_run_state(made.id, suspended, force=True)
        until(lambda: left(made.id) > timedelta(days=300), "a suspension without an end that is near")
        assert client.resume_flow_run(made.id).status is SetStateStatus.ACCEPT
        client.set_flow_run_state(made.id, Cancelled(), force=True)


def test_progress_and_warnings_are_lines_of_the_flow_runs_log(prefect_client: Served) -> None:
    def work() -> None:
        with reports_to_prefect(3):  # an offline run knows how many there are only once it has looked at its data
            for iteration in (1, 2, 3):
                announce("iteration", iteration=iteration, metrics={"reward/mean": 0.25})
        for step in range(1, 1001):
            announce("warm_start", step=step, steps=1000, loss=0.25)
        for finished in range(1, 33):
            announce("collect", iteration=1, finished=finished, planned=32)
        announce("evaluation", version=1, metrics={"evaluation/reward/mean": 0.75})
        logging.getLogger("roundhouse.anywhere").warning("MLflow lacks a part")

    told = log_of(work, "a part")
    assert [line for _, line in told if "starting policy 1000/1000" in line]
    assert [line for _, line in told if "rollouts 32/32" in line]
    assert [line for _, line in told if line.startswith("iteration   3/3  reward 0.250")]
    assert [line for _, line in told if "held-out" in line and "0.750" in line]
    assert ("WARNING", "MLflow lacks a part") in told
    assert len(told) < 20, "a line for every step would hide what matters"


def test_each_stage_has_a_line_with_its_main_figures(prefect_client: Served, tmp_path: Path) -> None:
    run = write_run(str(tmp_path / "store"), "a", iterations=1)
    rollouts = run.stage(1, "collect").reference()

    def work() -> None:
        announce("stage_done", name="collect", about="iteration 1", result=rollouts, begun=0.0)
        announce("stage_done", name="collect", about="iteration 2", result=rollouts, begun=time.time() + 1)
        announce("stage_done", name="engine", about="the run", result=None, begun=0.0)

    told = [line for _, line in log_of(work, "complete already")]
    [line] = [line for line in told if line.startswith("iteration 1: collect")]
    reward = read_manifest(rollouts).metrics["reward/mean"]
    assert line.endswith(f" s · reward {reward:.3f}")
    assert "iteration 2: collect was complete already" in told


def test_what_shows_an_iteration_is_sent_while_the_next_one_works_or_when_none_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two iterations Prefect's server makes a flow run, for which the run waits; it is asked for nothing else then."""
    sent: list[str] = []
    monkeypatch.setattr(report, "create_progress_artifact", lambda key, **_: sent.append(key))
    monkeypatch.setattr(report, "create_markdown_artifact", lambda key, **_: sent.append(key))
    monkeypatch.setattr(report, "QUIET_SECONDS", 60.0)
    monkeypatch.setattr(stages.refit_stage, "engine_at", lambda *_: "http://engine")
    monkeypatch.setattr(stages.collect_stage, "collect_iteration", lambda *_: report._await_artifacts(run))
    tree = {"run_id": "shown", "store": str(tmp_path), "tracking": {"enabled": False}}
    run = open_run(parse_config(tree))
    with report.tracked(run):
        reference = report.report_iteration.fn(run, 0)
        assert sent == []
        stages.collect.fn(run, 1, reference)
        assert sent == ["shown-progress", "shown-iteration"]
        run.begin(run.stage(1, "train"), policy_version=0).commit()
        report.report_iteration.fn(run, 1)
        assert len(sent) == 2
    assert len(sent) == 4


def test_a_deleted_run_leaves_no_flow_run_and_no_artifact_and_other_runs_stay(prefect_client: Served) -> None:
    @flow(name="shows", flow_run_name="{name}")
    def shows(name: str, *, inner: bool = True) -> None:
        create_markdown_artifact(key=f"{name}-page", markdown="text")
        if inner:
            shows(name, inner=False)

    for name in ("deleted", "stays"):
        with tags(f"run:{name}"):
            shows(name)
    assert controls.delete("deleted") == 2
    with get_client(sync_client=True) as client:
        assert {each.name for each in client.read_flow_runs()} >= {"stays"}
        assert {each.name for each in client.read_flow_runs()} & {"deleted"} == set()
        keys = {each.key for each in client.read_artifacts()}
    assert "stays-page" in keys
    assert "deleted-page" not in keys


def test_the_figures_of_a_stage_are_metrics_that_there_are() -> None:
    named = {metric for figures in FIGURES.values() for metric in figures}
    assert {metric for metric in named if meaning_of(metric) is None} == set()


def test_a_run_that_is_told_to_end_does_not_say_that_it_crashed(prefect_client: Served) -> None:
    def work() -> None:
        raise KeyboardInterrupt  # SIGTERM takes the same way, and Prefect sends it to this process once more

    told = log_of(work, ENDED)
    assert ("INFO", ENDED) in told
    assert [line for level, line in told if level in ("ERROR", "CRITICAL")] == []


def log_of(work: Callable[[], None], last: str) -> list[tuple[str, str]]:
    """Levels and messages of a flow run that does this, once the server has this one."""
    ids = []

    @flow(name="tells")
    def tells() -> None:
        ids.append(FlowRunContext.get().flow_run.id)
        with reports_to_prefect(2):
            work()

    with contextlib.suppress(KeyboardInterrupt):
        tells()
    deliver_queued_records()

    def told() -> list[tuple[str, str]]:
        with get_client(sync_client=True) as client:
            found = client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": [ids[0]]}}))
        return [(logging.getLevelName(line.level), line.message) for line in found]

    until(lambda: any(last in line for _, line in told()), "the flow run's log", evidence=lambda: str(told()))
    return told()
