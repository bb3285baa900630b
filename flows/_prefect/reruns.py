"""A flow run that runs again: after Retry, after a pause, after its machine was lost.

Prefect keeps the same flow run then and starts the flow's function from the top. What is complete is
known by the store alone; these two functions keep Prefect's own memory from getting in the way.

Upstream: PrefectHQ/prefect#22259, #18601. Since #22286 a sub-flow that a task calls has a key of its own; one that a flow calls
is still told from others by the order of the calls alone.
"""

from __future__ import annotations

from typing import Any

from prefect import Flow, Task
from prefect.context import FlowRunContext


def is_first_start() -> bool:
    """Whether this flow run runs for the first time. A resumed one does not count as another run: it has run for a time."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return True
    return context.flow_run.run_count <= 1 and not context.flow_run.total_run_time


def pin_subflow_index(sub_flow: Flow[..., Any], number: int) -> None:
    """Let the next call of the sub-flow be the call of this number (from 1) of its parent, whatever was called before.

    Prefect tells calls apart by their order. A parent that runs again begins its loop at the iteration that is missing; without
    a number, Prefect takes that call for the first one of the time before, and hands back the result of *that* iteration
    instead of running this one.
    """
    context = FlowRunContext.get()
    assert context is not None, "only a flow calls sub-flows"
    tracked = Task(name=sub_flow.name, fn=sub_flow.fn)  # as Prefect's engine makes it
    context.task_run_dynamic_keys[tracked.task_key] = number - 2
