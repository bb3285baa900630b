"""Keep a suspended flow run suspended until a person resumes it, and deliver missed suspensions.

*Suspend* on the Prefect page ends after 300 s by default, and the flow run then fails. Prefect notifies the flow run by
an event that is sent before the state is committed: a process that asks at once, while the database is busy, still
reads "running", and Prefect's observer does not ask again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, PrefectHTTPStatusError
from prefect.states import Suspended

PAUSE_SECONDS = 365 * 86_400
"""Prefect gives a pause an end, after which the flow run fails. A paused run waits for a person."""


@contextmanager
def lasting_suspensions() -> Iterator[None]:
    """For the block, this flow run rests until a person resumes it, however it was suspended.

    The end is moved away as soon as this process hears of the suspension, which is long before a stage has ended.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    flow_run, request = context.flow_run.id, context.flow_run_suspension_request
    mark = request.mark_requested

    def mark_for_long(state: State) -> None:
        _prolong(flow_run)
        mark(state)

    request.mark_requested = mark_for_long  # type: ignore[method-assign]
    try:
        yield
    except Pause:
        _prolong(flow_run)
        raise
    finally:
        request.mark_requested = mark  # type: ignore[method-assign]


async def prolong_suspensions(deployments: Sequence[UUID]) -> None:
    """Prolong the suspensions of all flow runs of these deployments, even if a flow run's process ended before it
    noticed.

    Raises:
        httpx.HTTPError, PrefectHTTPStatusError: the server does not answer, or refuses.
    """
    async with get_client() as client:
        suspended = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"state": {"name": {"any_": ["Suspended"]}}}),
            deployment_filter=DeploymentFilter.model_validate({"id": {"any_": list(deployments)}}),
        )
        for flow_run in suspended:
            if _ends_soon(flow_run.state):
                await client.set_flow_run_state(flow_run.id, Suspended(timeout_seconds=PAUSE_SECONDS), force=True)


def _prolong(flow_run: UUID) -> None:
    with suppress(httpx.HTTPError, PrefectHTTPStatusError), get_client(sync_client=True) as client:
        if _ends_soon(client.read_flow_run(flow_run).state):
            client.set_flow_run_state(flow_run, Suspended(timeout_seconds=PAUSE_SECONDS), force=True)


def _ends_soon(state: State | None) -> bool:
    """Return whether it is a suspension and its end is near or past. A suspension with a form is Roundhouse's, and ends
    late."""
    if state is None or not state.is_paused() or state.name != "Suspended":
        return False
    end = state.state_details.pause_timeout
    return end is not None and end < datetime.now(UTC) + timedelta(seconds=PAUSE_SECONDS / 2)


def heed_suspension() -> None:
    """Pause if the server reports this flow run as suspended.

    Raises:
        Pause: as Prefect raises it, for everything under the flow run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not is_deployed():
        return
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(context.flow_run.id).state
    except httpx.HTTPError:  # asked again before the next iteration
        return
    if state is not None and state.is_paused() and state.name == "Suspended":
        context.flow_run_suspension_request.mark_requested(state)
        raise Pause(state=state)


def is_deployed() -> bool:
    """Return whether Prefect can start this flow run again, so that it may wait without a process."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
