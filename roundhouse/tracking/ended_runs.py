"""Open MLflow pages of ended runs: the process was killed, or MLflow was away.

Invariant: a page is closed once. The run's heartbeat record holds the mark; the next process of the run begins with a new
record. A server that only the store names is asked only if a person on this machine accepted it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from roundhouse.config.secrets import masked_text
from roundhouse.errors import RoundhouseError
from roundhouse.health.heartbeat import read_beat, record_closed_page, state_of
from roundhouse.infra.consents import unaccepted_code
from roundhouse.store.run import Run, readable_runs

log = logging.getLogger(__name__)

STATUS_OF = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "crashed": "FAILED",
    "stopped": "KILLED",
    "not started": "KILLED",
}
"""Status of the page in MLflow by the state of an ended run."""
CLOSED_HERE = ("failed", "crashed", "stopped")
"""States in which a page may still be open. A finished run has its mark in the summary (`mlflow_complete`)."""


def open_pages(runs: Iterable[Run], server: str | None) -> dict[str, list[Run]]:
    """Return the ended runs with pages that may be open, by the page's server.

    Args:
        server: tracking server of the runs that do not configure one.
    """
    by_server: dict[str, list[Run]] = {}
    for run in runs:
        uri = run.config.tracking.uri or server
        if uri is None or not run.config.tracking.in_mlflow:
            continue
        beat = read_beat(run.location)
        if beat is None or beat.closed_in_mlflow == masked_text(uri) or state_of(run) not in CLOSED_HERE:
            continue
        if run.config.tracking.uri is None or not unaccepted_code(run.config, [], "tracking"):
            by_server.setdefault(uri, []).append(run)
    return by_server


def close_pages(runs: Iterable[Run], server: str | None) -> list[str]:
    """Close the pages of ended runs with the status of their state. Return the ids of the runs with a page that was open.

    A server that does not answer is asked once.

    Args:
        server: tracking server of the runs that do not configure one.
    """
    closed: list[str] = []
    if not (pages := open_pages(runs, server)):
        return closed
    from roundhouse.tracking.mlflow import client_of  # imports the stages

    for uri, ended in pages.items():
        try:
            client = client_of(uri, writes_traces=False)
            for run in ended:
                closed += [run.run_id] if _close_page(client, run) else []
                record_closed_page(run.location, uri)
        except Exception as error:  # noqa: BLE001 (border of the requests: a view may break in any way)
            log.warning(
                "MLflow at %s does not close the pages of ended runs: %s", masked_text(uri), masked_text(str(error))
            )
    return closed


def close_other_pages(run: Run) -> None:
    """Close the pages of the other runs in a run's store."""
    try:
        close_pages(readable_runs(run.config.store), os.environ.get("MLFLOW_TRACKING_URI"))
    except RoundhouseError as error:
        log.info("The pages of ended runs stay open: %s", error)


def _close_page(client: Any, run: Run) -> bool:
    """Close the page with the moment of the last heartbeat as its end. Return whether it was open."""
    from roundhouse.tracking.mlflow import RUNNING, page_of

    page, beat = page_of(client, run), read_beat(run.location)
    if page is None or beat is None or page.info.status != RUNNING:
        return False
    client.set_terminated(page.info.run_id, STATUS_OF[state_of(run)], int(beat.written_at * 1000))
    return True
