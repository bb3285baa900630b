"""A small record in the run's directory that its process rewrites regularly: work in flight, health, newest errors.

    <store>/runs/<run_id>/health.json

Invariant: the record is a view. Nothing depends on it, and a record that cannot be written stops nothing. Its age shows
whether the process lives; its work in flight shows the last activity of a dead process.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.activity import ACTIVITY, Activity, announce
from roundhouse.config.secrets import masked_text
from roundhouse.errors import KILLED_FOR_MEMORY, BudgetReached, ProcessKilled, StoreError
from roundhouse.health.errors import ErrorInfo, ErrorReporter, Health, Severity
from roundhouse.health.policy import code_of_type
from roundhouse.store import lease
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run

log = logging.getLogger(__name__)

RECORD = "health.json"
KILLED = code_of_type(ProcessKilled.__name__)
LISTED_WORK = 50
LISTED_ERRORS = 50
DEAD_AFTER_BEATS = 3
RENEWED_LATE = 1.1
"""Longest mean time from one renewal of a lease to the next, in intervals."""


Outcome = Literal["done", "failed", "stopped"]
"""End of a process's work on a run: at the end of the flow, with an error, or stopped by a person or a budget."""


def outcome_of(error: BaseException | None) -> Outcome:
    """Return how a block that this exception leaves has ended.

    >>> outcome_of(KeyboardInterrupt())
    'stopped'
    """
    if error is None:
        return "done"
    return "failed" if isinstance(error, Exception) and not isinstance(error, BudgetReached) else "stopped"


class InFlight(BaseModel):
    """A piece of work, as `activity.Work`."""

    model_config = ConfigDict(frozen=True)

    module: str
    kind: str
    about: str
    where: str
    seconds: float
    silent_seconds: float


class Beat(BaseModel):
    """One heartbeat."""

    model_config = ConfigDict(frozen=True)

    written_at: float
    """Seconds since the epoch."""
    every_seconds: float
    pid: int
    host: str
    ended: bool
    """Whether the process itself reported its end."""
    outcome: Outcome | None = None
    """Kind of the end; None while it works, and in the record of an older version."""
    closed_in_mlflow: str = ""
    """Address of the server that shows this end. The next process of the run begins with a new record."""
    counts: dict[str, int]
    """Numbers of work in flight, by module and kind."""
    in_flight: list[InFlight]
    """The oldest of it."""
    gauges: dict[str, float]
    health: Health
    errors: list[ErrorInfo]
    """The newest, oldest first, also those of earlier processes."""

    def state(self, now: float) -> str:
        """`working`, `idle`, `ended`, or `silent`: the process is gone, or hangs altogether."""
        if self.ended:
            return "ended"
        if now - self.written_at > DEAD_AFTER_BEATS * self.every_seconds:
            return "silent"
        return "working" if self.counts else "idle"

    def end_without_report(self) -> str | None:
        """Return a sentence on a process that ended without a last heartbeat, with its work then; None if it reported its end.

        The caller knows that the process no longer drives the run.
        """
        if self.ended:
            return None
        work = ", ".join(self.counts) or "nothing in flight"
        memory = f" {KILLED_FOR_MEMORY}" if any(each.module == "train" for each in self.in_flight) else ""
        return f"Process {self.pid} on {self.host} ended without a report ({work}): killed, or its machine stopped.{memory}"


class Heartbeat:
    """Write the record from a separate thread during a block."""

    def __init__(
        self,
        location: Location,
        reporter: ErrorReporter,
        every_seconds: float,
        activity: Activity = ACTIVITY,
        on_beat: Callable[[Beat], None] | None = None,
    ) -> None:
        self._location = location
        self._reporter = reporter
        self._every_seconds = every_seconds
        self._activity = activity
        self._on_beat = on_beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if (before := read_beat(self._location)) is not None:
            self._reporter.restore(before.errors)
            if (note := before.end_without_report()) is not None:
                self._reporter.report_error("driver", "before this start", note, Severity.WARNING, {"code": KILLED})
                announce("alert", name=KILLED, text=note)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(self._every_seconds)
        self._beat(outcome_of(error))

    def _run(self) -> None:
        self._beat(None)
        while not self._ended.wait(self._every_seconds):
            self._beat(None)

    def _beat(self, outcome: Outcome | None) -> None:
        works = self._activity.in_flight()
        listed: list[dict[str, Any]] = [
            {name: getattr(work, name) for name in InFlight.model_fields} for work in works[:LISTED_WORK]
        ]
        beat = Beat(
            written_at=time.time(),
            every_seconds=self._every_seconds,
            pid=os.getpid(),
            host=platform.node(),
            ended=outcome is not None,
            outcome=outcome,
            counts=Counter(f"{work.module}: {work.kind}" for work in works),
            in_flight=[InFlight.model_validate(fields) for fields in listed],
            gauges=self._activity.gauges(),
            health=self._reporter.health(),
            errors=self._reporter.errors()[-LISTED_ERRORS:],
        )
        try:
            self._location.write(RECORD, beat.model_dump_json(indent=1).encode())
            if self._on_beat is not None:
                self._on_beat(beat)
        except Exception:  # a failing view must not stop a run
            log.warning("the heartbeat of %s could not be reported", self._location.uri, exc_info=True)


def read_beat(location: Location) -> Beat | None:
    """Return the newest record in a run's directory; None if no readable one exists."""
    try:
        return Beat.model_validate_json(location.read(RECORD))
    except NotFound:
        return None
    except (StoreError, ValidationError) as error:
        log.warning("%s/%s cannot be read: %s", location.uri, RECORD, error)
        return None


def record_closed_page(location: Location, server: str) -> None:
    """Record that a server of MLflow shows how the last process of a run ended."""
    if (beat := read_beat(location)) is not None:
        closed = beat.model_copy(update={"closed_in_mlflow": masked_text(server)})
        location.write(RECORD, closed.model_dump_json(indent=1).encode())


def _has_vanished(holder: lease.LeaseRecord, beat: Beat) -> bool:
    """Return whether the driver of another machine has been silent for too long, by the clocks of both."""
    patience = max(holder.seconds, DEAD_AFTER_BEATS * beat.every_seconds)
    heard = beat.written_at
    if heard < holder.since:  # an earlier driver's: this one may wait for services or the engine, and renews its lease
        heard = holder.since + holder.renewals * RENEWED_LATE * holder.seconds / lease._RENEWALS
    return time.time() - heard > patience


State = Literal["finished", "running", "failed", "stopped", "crashed", "not started"]
"""State of a run in one word, from its store alone:

finished       all its iterations are done running        a process holds its lease; one of another machine, and has
shown a sign of life failed         its process ended with an error stopped        its process ended before the last
iteration: suspended, cancelled, or interrupted by a person crashed        its process disappeared without a report; the
same command resumes it not started    it was created, and no process has worked on it
"""


def state_of(run: Run) -> State:
    """Return the run's state."""
    holder, beat = lease.holder(run.location), read_beat(run.location)
    if holder is not None and not (holder.is_elsewhere and beat is not None and _has_vanished(holder, beat)):
        return "running"
    summary = run.summary()
    if summary is not None and summary["iterations"] >= summary.get("iterations_wanted", run.config.iterations):
        return "finished"
    if beat is None:
        return "not started"
    if not beat.ended:
        return "crashed"
    if beat.outcome is None:  # an older version's record
        return "failed" if beat.health.status == "error" else "stopped"
    return "failed" if beat.outcome == "failed" else "stopped"
