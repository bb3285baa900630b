"""The end of a flow that used an engine: release its replicas, so that a run that does not work holds no GPU.

A flow ends when its run is finished, fails, is suspended, is cancelled, or has used up its budget. A signal that ends a pod is
no such end if the cluster starts another pod, which resumes the run: then the replicas stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectHTTPStatusError, TerminationSignal

from roundhouse.stages.refit import release_engine
from roundhouse.store.lease import LeaseLost, holder, refuse_lost
from roundhouse.store.run import Run


@contextmanager
def engine_released_at_end(run: Run) -> Iterator[None]:
    """On exit, release the engine's replicas, unless the run continues in this Job's next pod or in another process."""
    next_pod_resumes = False
    try:
        yield
    except TerminationSignal:
        next_pod_resumes = not is_cancelled()
        raise
    finally:
        with suppress(LeaseLost):
            refuse_lost(run.location)
            release_engine(run, next_pod_resumes=next_pod_resumes)


@contextmanager
def engine_released_after_use(run: Run) -> Iterator[None]:
    """Release the engine as `engine_released_at_end` does, in a flow outside the training run: a process that drives
    the run keeps its engine."""
    if holder(run.location) is not None:
        yield
        return
    with engine_released_at_end(run):
        yield


def is_cancelled() -> bool:
    """Return whether a person cancelled this flow run, by Prefect's record; False if Prefect does not answer."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(context.flow_run.id).state
    except (httpx.HTTPError, PrefectHTTPStatusError):
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
