"""What a run does when an iteration has failed: stop, wait and try again, or skip it on record.

The decision is `roundhouse.health.policy`; here it is carried out. Failed tries stay in Prefect as failed sub-flows.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from flows._prefect.reruns import pin_subflow_index
from flows._prefect.tuning import tagged
from flows.iteration import iteration
from roundhouse.config.models import RunConfig
from roundhouse.health.errors import Severity
from roundhouse.health.policy import Course, Past, Step, after_failure
from roundhouse.health.taxonomy import code_of, kind_of
from roundhouse.progress import announce
from roundhouse.stages.skip import skip_after, skipped_in_a_row
from roundhouse.store.lease import refuse_lost
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.health import reporter_of
from tasks.report import report_iteration
from tasks.skip import skip_iteration

if TYPE_CHECKING:
    from prefect import Flow

TRY = 1_000_000
"""Between the places of two tries of one iteration: more iterations than any run has."""


def carry_out(run: Run, k: int, by: Flow[[RunConfig, int], Reference] = iteration) -> Reference:
    """Iteration k, by its sub-flow, under `failures.policy`."""
    config = run.config
    past = Past(skipped_in_a_row(run, k))
    while True:
        pin_subflow_index(by, k + past.waits * TRY)
        try:
            return tagged(by, f"run:{run.run_id}", f"iteration:{k}")(config, k)
        except Exception as error:
            refuse_lost(run.location)  # what failed may have failed since another process drives the run
            course = after_failure(error, config.failures, past)
            _tell(run, k, error, course)
            if course.step is Step.STOP:
                raise
            if course.step is Step.SKIP:
                published = skip_iteration(run, k, skip_after(error, course.reason))
                report_iteration(run, k)
                return published
        time.sleep(course.seconds)
        past = replace(past, waits=past.waits + 1, waited_seconds=past.waited_seconds + course.seconds)


def _tell(run: Run, k: int, error: Exception, course: Course) -> None:
    wait = f", {course.seconds:.0f} s" if course.step is Step.WAIT else ""
    reporter_of(run).report_error(
        "train",
        f"iteration {k}",
        f"Iteration {k} failed ({code_of(error)}): {course.step}{wait}, since {course.reason}.",
        Severity.ERROR if course.step is Step.STOP else Severity.WARNING,
        {"code": code_of(error), "kind": kind_of(error).value, "step": course.step.value},
    )
    announce("recovery", iteration=k, step=course.step.value, code=code_of(error), seconds=course.seconds)
