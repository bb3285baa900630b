"""What a person sees of a flow run on Prefect's page while it works, rests or is told to end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.states import Suspended

from flows._prefect.delivery import deliver_queued_records
from flows.controls import lasting_suspensions
from flows.prefect_log import ENDED, reports_to_prefect
from roundhouse.progress import announce
from tests.flows.served import Served, until

DIALOG_SECONDS = 300
"""What the page's *Suspend* proposes."""


def suspend(context: Any) -> Any:
    """What the page does; the state that Prefect's observer is told."""
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

    until(lambda: any(last in line for _, line in told()), "the flow run's log", lambda: str(told()))
    return told()
