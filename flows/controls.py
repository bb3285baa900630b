"""Pause, resume and cancel by run ID, as the buttons of the Prefect page do.

Invariant: only the newest flow run that a deployment started for the run is changed; its iterations follow it.
"""

from __future__ import annotations

from contextlib import suppress

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelling, Suspended

from roundhouse.errors import ConfigError, InfraError, StoreError
from roundhouse_flows._prefect.suspension import PAUSE_SECONDS


def pause(run_id: str) -> str:
    """Let the run stop at the next border of a stage; the flow run's id."""
    return _ask(run_id, (StateType.RUNNING,), Suspended(timeout_seconds=PAUSE_SECONDS))


def cancel(run_id: str) -> str:
    """End all processes of the run; the flow run's id."""
    at_work = (StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED)
    return _ask(run_id, at_work, Cancelling())


def delete(run_id: str) -> int:
    """Delete the run's flow runs with their tasks, logs and artifacts, however they were started, and return their
    number.

    Raises:
        httpx.HTTPError, PrefectHTTPStatusError: the server does not answer, or refuses.
    """
    count = 0
    with get_client(sync_client=True) as client:
        runs = FlowRunFilter.model_validate({"tags": {"all_": [f"run:{run_id}"]}})
        while flow_runs := client.read_flow_runs(flow_run_filter=runs):
            selection = {"flow_run_id": {"any_": [each.id for each in flow_runs]}}
            while artifacts := client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(selection)):
                for artifact in artifacts:
                    client.delete_artifact(artifact.id)
            for each in flow_runs:
                with suppress(ObjectNotFound):  # it went with its parent
                    client.delete_flow_run(each.id)
                count += 1
    return count


def resume(run_id: str) -> str | None:
    """Continue the run's newest flow run: a paused one resumes; a failed, crashed or cancelled one runs again.

    Returns its ID; None if it does not exist or is in another state.
    """
    with get_client(sync_client=True) as client:
        newest = _newest(client, run_id)
        if newest is not None and newest.state_type in (StateType.FAILED, StateType.CRASHED, StateType.CANCELLED):
            return _set_state(client, newest, AwaitingRetry())
        return let_go_on(client, run_id)


def let_go_on(client: SyncPrefectClient, run_id: str, waits_for: str = "") -> str | None:
    """Resume the run's paused flow run if its pause key starts so; return its ID, or None if it does not exist.

    A flow run that waits with a form gets an empty form: it reads the answer from the store.
    """
    newest = _newest(client, run_id)
    if newest is None or newest.state is None or newest.state_type != StateType.PAUSED:
        return None
    details = newest.state.state_details
    if not (details.pause_key or "").startswith(waits_for):
        return None
    reply = client.resume_flow_run(newest.id, run_input={} if details.run_input_keyset else None)
    if reply.status != SetStateStatus.ACCEPT:
        raise InfraError(f"Prefect refuses to resume flow run {newest.id}: {reply.details}")
    return str(newest.id)


def _ask(run_id: str, possible: tuple[StateType, ...], state: State) -> str:
    with get_client(sync_client=True) as client:
        newest = _newest(client, run_id)
        if newest is None:
            raise StoreError(
                f"No run {run_id!r} at this Prefect server: no deployment has started one. A run in a terminal is stopped "
                "there by Ctrl-C."
            )
        if newest.state_type not in possible:
            raise ConfigError(
                f"Run {run_id!r} has no flow run in state {' or '.join(each.value for each in possible)}: the newest is "
                f"{newest.state_name}."
            )
        return _set_state(client, newest, state)


def _set_state(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> str:
    reply = client.set_flow_run_state(flow_run.id, state)
    if reply.status != SetStateStatus.ACCEPT:
        raise InfraError(f"Prefect refuses {state.name} for flow run {flow_run.id}: {reply.details}")
    return str(flow_run.id)


def _newest(client: SyncPrefectClient, run_id: str) -> FlowRun | None:
    flow_runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(
            {"tags": {"all_": [f"run:{run_id}"]}, "deployment_id": {"is_null_": False}}
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=1,
    )
    return flow_runs[0] if flow_runs else None
