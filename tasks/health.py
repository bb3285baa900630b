"""State of a run in Prefect and MLflow: events, tags and gauges from `roundhouse.health`.

Every error at a stage's boundary becomes one event `roundhouse.failure.<code>` of the resource
`roundhouse.run.<run_id>`, and every alert one `roundhouse.alert.<name>`, on which Prefect automations can act
(`flows/alerts.py`). A Prefect thread sends events; an unreachable server costs nothing. MLflow has the newest as tags,
and the gauges once a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.context import FlowRunContext
from prefect.events import emit_event

from roundhouse.activity import ACTIVITY, FailureListener, announce
from roundhouse.health.errors import Alert, ErrorInfo, ErrorReporter, Health, Severity
from roundhouse.health.heartbeat import Beat, Heartbeat
from roundhouse.health.policy import code_of
from roundhouse.store.run import Run

FAILURE_SECONDS = 60.0
"""Shortest interval between reports of one kind of failure in tracked work: a thousand model calls may fail for one
reason."""
GAUGE_SECONDS = 60.0
"""Interval of gauges in MLflow: its database keeps every point."""
SYSTEM = "system"
"""Prefix of metrics that MLflow lists with the machine's load instead of the iterations' metrics."""
_TAG_CHARACTERS = 500

_reporters: dict[str, ErrorReporter] = {}
"""The reporter of each run that this process works on, by run uid."""


def reporter_of(run: Run) -> ErrorReporter:
    """The run's reporter in this process."""
    if run.uid not in _reporters:
        reporter = _reporters[run.uid] = ErrorReporter()
        reporter.listen(lambda error: _emit(run, error))
        reporter.listen(lambda error: _tag(run, error, reporter.health()))
    return _reporters[run.uid]


@contextmanager
def heartbeat(run: Run) -> Iterator[None]:
    """Keep the run's record up to date during a block, including the failures of its tracked work."""
    every = run.config.failures.heartbeat_seconds
    with (
        Heartbeat(run.location, reporter_of(run), every, on_beat=_gauges(run)),
        ACTIVITY.failures_to(_failures(reporter_of(run))),
    ):
        yield


def _failures(reporter: ErrorReporter, clock: Callable[[], float] = time.monotonic) -> FailureListener:
    """Report a failure of tracked work as information, because its caller may retry, and a failing stage has its own
    error. At most one a minute of one module and type."""
    reported: dict[tuple[str, str], float] = {}

    def failed(module: str, what: str, error: Exception) -> None:
        kind = (module, type(error).__name__)
        if what.startswith("stage") or clock() - reported.get(kind, -FAILURE_SECONDS) < FAILURE_SECONDS:
            return
        reported[kind] = clock()
        reporter.report_exception(module, what, error, Severity.INFO, {"code": code_of(error)})

    return failed


def tell(run: Run, alert: Alert, about: str, severity: Severity = Severity.WARNING) -> None:
    """Report an alert as the run's errors are: in its record, in MLflow, and as an event. Once, also after a restart."""
    reporter = reporter_of(run)
    if any(
        earlier.details.get("event") == alert.event and earlier.work_context == about for earlier in reporter.errors()
    ):
        return
    reporter.report_error("alert", about, alert.message, severity, {"code": alert.name, "event": alert.event})
    announce("alert", name=alert.name, text=alert.message)


def _emit(run: Run, error: ErrorInfo) -> None:
    context = FlowRunContext.get()
    flow_run = None if context is None else context.flow_run
    own = {} if flow_run is None else {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
    emit_event(
        event=error.details.get("event") or f"roundhouse.failure.{error.details.get('code', 'reported')}",
        resource={"prefect.resource.id": f"roundhouse.run.{run.run_id}", "prefect.resource.name": run.run_id},
        # An automation would suspend the first flow run that it finds
        related=[own | {"prefect.resource.role": "flow-run"}] if own else [],
        payload=error.model_dump(mode="json", exclude={"exception_traceback"}),
    )


def _tag(run: Run, error: ErrorInfo, health: Health) -> None:
    from roundhouse_tasks.report import opened_tracker

    if error.severity is Severity.INFO or (tracker := opened_tracker(run)) is None:
        return
    text = f"{error.severity} in {error.module_name} ({error.work_context}): {error.message}"
    tracker.tag({"roundhouse.health": health.status, "roundhouse.last_error": text[:_TAG_CHARACTERS]})


def _gauges(run: Run) -> Callable[[Beat], None]:
    told_at = time.monotonic()

    def on_beat(beat: Beat) -> None:
        from roundhouse_tasks.report import opened_tracker

        nonlocal told_at
        if (not beat.ended and time.monotonic() - told_at < GAUGE_SECONDS) or (tracker := opened_tracker(run)) is None:
            return
        told_at = time.monotonic()
        tracker.tag({"roundhouse.health": beat.health.status})
        gauges = beat.gauges | {"health/recent_errors": float(beat.health.recent_error_count)}
        tracker.log_gauges({f"{SYSTEM}/{name}": value for name, value in gauges.items()})

    return on_beat
