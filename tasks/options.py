"""What all stage tasks have in common.

A stage's result is a small reference; Prefect keeps it as JSON. Prefect's own cache is off: the store alone decides
whether a stage is complete, so that Retry in the UI and a new start of the same run take the same path.
"""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from roundhouse.errors import InfraError


def _is_infrastructure_failure(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Repeat what may pass by itself; fail at once on bad data and defects."""
    return isinstance(state.data, InfraError)


STAGE: dict[str, Any] = {
    "persist_result": True,
    "result_serializer": "json",
    "cache_policy": NO_CACHE,
    "retries": 2,
    "retry_delay_seconds": [2, 10],
    "retry_condition_fn": _is_infrastructure_failure,
}
"""Keyword arguments of a stage's `@task`."""
