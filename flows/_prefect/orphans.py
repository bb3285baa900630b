"""Flow runs that Prefect still shows as running after their process has died.

Upstream: PrefectHQ/prefect#16746; the documented automation on heartbeats takes minutes, while this runs at a start.

Invariant: called before anything is served, so every active flow run of the deployments is an orphan. Each gets a state
that a person can act on: a cancelling one is cancelled, a submitted one is submitted again, a running one has crashed
and Retry continues it. Generation loops of earlier starts are orphans too: an iteration continues in its old flow run,
a loop in a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Crashed, Scheduled

log = logging.getLogger(__name__)

_AT_WORK = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)


async def settle_orphans(deployments: Sequence[UUID]) -> list[FlowRun]:
    """Give every orphan its state; returns them."""
    async with get_client() as client:
        flow_runs = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": _AT_WORK}}}),
            deployment_filter=DeploymentFilter.model_validate({"id": {"any_": list(deployments)}}),
        )
        for orphan in flow_runs:
            await client.set_flow_run_state(orphan.id, _settled(orphan), force=True)
    return flow_runs


def _settled(orphan: FlowRun) -> State:
    if orphan.state_type == StateType.CANCELLING:
        return Cancelled(message="Its process had ended already.")
    if orphan.state_type == StateType.PENDING:
        return Scheduled(message="It had been taken up by a process that is gone.")
    return Crashed(message="Its process has ended. Retry continues at its last stage.")


def end_generation_loops(run_id: str) -> None:
    """End the flow runs of generation loops that ended without a word, as in a pause or when their process was killed.

    Their parent is the iteration that began them, which may be complete: nobody else would ever end them.
    """
    try:
        with get_client(sync_client=True) as client:
            flow_runs = client.read_flow_runs(
                flow_filter=FlowFilter.model_validate({"name": {"any_": ["generation"]}}),
                flow_run_filter=FlowRunFilter.model_validate(
                    {"tags": {"all_": [f"run:{run_id}"]}, "state": {"type": {"any_": _AT_WORK}}}
                ),
            )
            for loop in flow_runs:
                ended: State = Cancelled(
                    message="It ended with the run's process. The run starts another when it continues."
                )
                client.set_flow_run_state(loop.id, ended, force=True)
    except httpx.HTTPError as error:  # nothing depends on it
        log.warning("Generation loops of before are still shown as running: %s", error)
