"""Flow runs that run again: after Retry, after a pause, after the loss of their machine.

Prefect then keeps the same flow run and starts the flow's function from the top. Only the store records complete work;
these two functions keep Prefect's own memory from interfering.

Upstream: PrefectHQ/prefect#22259, #18601. Since #22286 a sub-flow that a task calls has a separate key; a sub-flow that
a flow calls is still identified only by the order of the calls.
"""

from __future__ import annotations

from typing import Any

from prefect import Flow, Task
from prefect.context import FlowRunContext


def is_first_start() -> bool:
    """Return whether this flow run runs for the first time. A resumed one is not new: it has run before."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return True
    return context.flow_run.run_count <= 1 and not context.flow_run.total_run_time


def pin_subflow_index(sub_flow: Flow[..., Any], number: int) -> None:
    """Number the next call of the sub-flow within its parent (from 1), whatever was called before.

    Prefect identifies calls by their order. A parent that runs again starts its loop at the missing iteration; without
    a number, Prefect takes that call for the first one of the earlier run and returns the result of *that* iteration
    instead of running this one.
    """
    context = FlowRunContext.get()
    assert context is not None, "only a flow calls sub-flows"
    tracked = Task(name=sub_flow.name, fn=sub_flow.fn)  # as Prefect's engine makes it
    context.task_run_dynamic_keys[tracked.task_key] = number - 2
