"""Sends what Prefect's client still has queued while its server is up (as PrefectHQ/prefect#14854 does for test servers).

At the end of a process Prefect waits for a server that may be gone by then; a run that stops its own services has to let the
queued states and logs go first.
"""

from __future__ import annotations

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker


def deliver_queued_records(seconds: float = 10.0) -> None:
    """Deliver queued events and logs, each within the time limit."""
    EventsWorker.drain_all(timeout=seconds)
    APILogWorker.drain_all(timeout=seconds)
