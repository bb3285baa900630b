"""Common part of all stage tasks: their options, and the boundary at which a failure gets its kind.

A stage's result is a small reference, which Prefect keeps as JSON. Prefect's cache is off: the store alone decides
whether a stage is complete, so Retry in the UI and a new start of the same run take the same path.

At the boundary an error is typed (`roundhouse.health.policy`) and reported once, and a stage without progress is
aborted (`roundhouse.activity`). This module decides which kinds are retried; `roundhouse_flows.iteration.carry_out`
handles the rest.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import Task

from roundhouse.activity import Stalled, announce, supervised
from roundhouse.config.operations import stall_seconds
from roundhouse.health.policy import Kind, code_of, kind_of, severity_of, typed
from roundhouse.store.lease import refuse_lost
from roundhouse.store.run import Run
from roundhouse.store.stage import Reference
from roundhouse_tasks.health import reporter_of

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 2
"""Retries of a stage for infrastructure failures; rollouts have separate attempts within it (`rollout.retry`)."""


def _is_infrastructure_failure(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Repeat what may pass by itself; fail at once on bad data and defects."""
    return isinstance(state.data, BaseException) and kind_of(state.data) is Kind.INFRA


STAGE: dict[str, Any] = {
    "persist_result": True,
    "result_serializer": "json",
    "cache_policy": NO_CACHE,
    "retries": RETRIES,
    "retry_delay_seconds": [2, 10],
    "retry_condition_fn": _is_infrastructure_failure,
}
"""Keyword arguments of a stage's `@task`."""


def stage_task(*, name: str, task_run_name: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """`@task` for a function that takes the run first: with the options of a stage, and its boundary."""

    def decorate(function: Callable[P, R]) -> Task[P, R]:
        return task(name=name, task_run_name=task_run_name, **STAGE)(stage_boundary(name, function))

    return decorate


def stage_boundary(stage: str, function: Callable[P, R]) -> Callable[P, R]:
    """The function, watched, with its errors typed and reported."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def bordered(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        run: Run = arguments["run"]
        about = _about(arguments)
        announce("stage", name=stage, about=about)
        start = time.time()
        try:
            result = supervised(
                lambda: function(*args, **kwargs),
                stage,
                about,
                stall_seconds(run.config),
                refuse=lambda: refuse_lost(run.location),
            )
        except Exception as error:
            kind, context = kind_of(error), TaskRunContext.get()
            attempt = 1 if context is None else context.task_run.run_count
            again = kind is Kind.INFRA and attempt <= RETRIES
            details: dict[str, Any] = {"code": code_of(error), "kind": kind.value, "attempt": attempt, "again": again}
            if isinstance(error, Stalled):
                details["stack"] = error.stack
            if again:
                announce("retry", name=stage, about=about, text=str(error))
            reporter_of(run).report_exception(stage, about, error, severity_of(error, again=again), details)
            if (known := typed(error)) is not error:
                raise known from error
            raise
        announce("stage_done", name=stage, about=about, result=result, begun=start)
        return result

    return bordered


def _about(arguments: dict[str, Any]) -> str:
    if "iteration" in arguments:
        return f"iteration {arguments['iteration']}"
    reference = next((value for value in arguments.values() if isinstance(value, Reference)), None)
    return "the run" if reference is None else f"version {reference.policy_version}"
