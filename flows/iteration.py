"""One iteration: from version k-1 to version k, and the run's reaction to its failure.

Synchronous, asynchronous and offline runs share this flow; they differ in the source of the sequences (`Source`).
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal, Protocol

from prefect import Flow, flow

from roundhouse.activity import announce
from roundhouse.config.models import RunConfig
from roundhouse.errors import StoreError
from roundhouse.health.errors import Severity
from roundhouse.health.policy import Past, Step, after_failure, code_of, kind_of
from roundhouse.stages.checkpoint import skip_after, skipped_in_a_row
from roundhouse.stages.report import reaches_target
from roundhouse.store.lease import refuse_lost
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse_flows._prefect.reruns import pin_subflow_index
from roundhouse_flows._prefect.tuning import OpaqueConfig, tagged, untagged_tasks
from roundhouse_tasks.health import reporter_of
from roundhouse_tasks.report import report_iteration
from roundhouse_tasks.stages import (
    checkpoint,
    collect,
    evaluate,
    own_stage,
    promote,
    refit,
    skip_iteration,
    train_step,
    validate,
    validate_batch,
)


@flow(
    name="iteration", flow_run_name="{config.run_id} iteration {k:04d}", persist_result=True, result_serializer="json"
)
def iteration(config: OpaqueConfig, k: int) -> Reference:
    """Refit, collect, validate, train, checkpoint, and every N iterations evaluate."""
    run, source = _carried.get(None), _source.get()
    if run is None or run.config is not config:  # called by another flow than `carry_out`'s
        run = open_run(config)
    base = run.checkpoint(k - 1).reference()
    if base is None:
        raise StoreError(f"iteration {k} needs the checkpoint of version {k - 1}, which is not complete")

    with untagged_tasks():
        with source.sequences(run, k, base) as sequences:
            own_stages(run, k, "after_validate", sequences)
            update = train_step(run, k, sequences, base)
            published = checkpoint(run, update)
        own_stages(run, k, "after_checkpoint", published)
        if is_evaluated(config, k) or (has_evaluations(config) and reaches_target(run, k)):
            with source.evaluation(k):
                evaluate(run, published)
            promote(run, k)
        report_iteration(run, k)
    return published


def own_stages(run: Run, k: int, place: Literal["after_validate", "after_checkpoint"], reference: Reference) -> None:
    """Run the stages of `stages.after_…`, in their order."""
    for target in getattr(run.config.stages, place):
        own_stage(run, k, target, f"stages.{place}", reference)


def is_evaluated(config: RunConfig, k: int) -> bool:
    """Return whether version k is evaluated: the last one, and every `evaluation.every`-th; none if that is null."""
    every = config.evaluation.every
    return every is not None and has_engine(config) and (k == config.iterations or (every > 0 and k % every == 0))


def has_evaluations(config: RunConfig) -> bool:
    return config.evaluation.every is not None and has_engine(config)


def has_engine(config: RunConfig) -> bool:
    """Return whether a run needs an engine: an offline run only for evaluation."""
    return config.offline is None or config.offline.evaluate


class Source(Protocol):
    """Source of a run's sequences."""

    def sequences(self, run: Run, k: int, base: Reference) -> AbstractContextManager[Reference]:
        """The validated sequences of iteration k, for the time of its training and checkpoint."""
        ...

    def evaluation(self, k: int) -> AbstractContextManager[None]:
        """The block evaluates version k: the engine keeps it."""
        ...


class Synchronous:
    """Collect with the version that the iteration trains from (`asynchrony.staleness` 0)."""

    @contextmanager
    def sequences(self, run: Run, k: int, base: Reference) -> Iterator[Reference]:
        weights = refit(run, k, base)
        rollouts = collect(run, k, weights)
        yield validate(run, k, rollouts)

    def evaluation(self, k: int) -> AbstractContextManager[None]:
        return nullcontext()


class Offline(Synchronous):
    """A batch of the collected datasets."""

    @contextmanager
    def sequences(self, run: Run, k: int, base: Reference) -> Iterator[Reference]:
        yield validate_batch(run, k)


@contextmanager
def source_of(run: Run) -> Iterator[None]:
    """Set the source of sequences for the iterations in the block, by the run's configuration."""
    if run.config.offline is not None:
        loop: AbstractContextManager[Source] = nullcontext(Offline())
    elif run.config.asynchrony.staleness == 0:
        loop = nullcontext(Synchronous())
    else:
        from roundhouse_flows.generation import generation_loop

        loop = generation_loop(run)
    with loop as source, iterating_on(source):
        yield


@contextmanager
def iterating_on(source: Source) -> Iterator[None]:
    """The iterations in the block get their sequences from this source."""
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


_source: contextvars.ContextVar[Source] = contextvars.ContextVar("source")
_carried: contextvars.ContextVar[Run] = contextvars.ContextVar("run")
"""The run of `carry_out`, opened once for all its iterations."""

TRY = 1_000_000
"""Between the places of two tries of one iteration: more iterations than any run has."""


def carry_out(run: Run, k: int, by: Flow[[RunConfig, int], Reference] = iteration) -> Reference:
    """Iteration k, by its sub-flow, under `failures.policy`: a failure stops the run, is waited out, or skipped on record. The
    decision is `roundhouse.health.policy`'s. Failed tries stay in Prefect as failed sub-flows."""
    config = run.config
    _carried.set(run)
    past = Past(skipped_in_a_row(run, k))
    while True:
        pin_subflow_index(by, k + past.waits * TRY)
        try:
            return tagged(by, f"run:{run.run_id}", f"iteration:{k}")(config, k)
        except Exception as error:
            refuse_lost(run.location)  # the failure may come from another process that drives the run
            course = after_failure(error, config.failures, past)
            wait = f", {course.seconds:.0f} s" if course.step is Step.WAIT else ""
            reporter_of(run).report_error(
                "train",
                f"iteration {k}",
                f"Iteration {k} failed ({code_of(error)}): {course.step}{wait}, since {course.reason}.",
                Severity.ERROR if course.step is Step.STOP else Severity.WARNING,
                {"code": code_of(error), "kind": kind_of(error).value, "step": course.step.value},
            )
            announce("recovery", iteration=k, step=course.step.value, code=code_of(error), seconds=course.seconds)
            if course.step is Step.STOP:
                raise
            if course.step is Step.SKIP:
                published = skip_iteration(run, k, skip_after(error, course.reason))
                report_iteration(run, k)
                return published
        time.sleep(course.seconds)
        past = replace(past, waits=past.waits + 1, waited_seconds=past.waited_seconds + course.seconds)
