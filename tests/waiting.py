"""Waits for events of other threads or processes: for the event itself, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SECONDS = 240.0
"""What is not there by then does not come: less than pytest's own limit of a test, which could not say what was waited for."""


def until(
    holds: Callable[[], Any],
    what: str = "what was waited for",
    *,
    process: Any = None,
    evidence: Callable[[], str] = str,
    seconds: float = SECONDS,
) -> Any:
    """Return the result of `holds` as soon as it is true. `process`, if given, causes it and must not end before (its `poll`).

    Raises AssertionError, with `evidence`, if the process has ended or the time is over.
    """
    begun = asked = time.monotonic()
    while not (found := holds()):
        assert process is None or process.poll() is None, f"its process ended before {what}\n{evidence()}"
        now = time.monotonic()
        assert now - begun < seconds, f"not within {seconds:g} s: {what}\n{evidence()}"
        time.sleep(max(0.02, 4 * (now - asked)))  # asking takes a fifth of the time at most
        asked = time.monotonic()
    return found
