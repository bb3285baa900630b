"""How a test waits for what another thread or process brings about: for the thing itself, however slow the machine is."""

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
    """What `holds` answers, once that is true. `process`, if given, brings it about, and must not end before (its `poll`).

    Raises AssertionError, with `evidence`, where the process has ended, or when it does not come.
    """
    begun = asked = time.monotonic()
    while not (found := holds()):
        assert process is None or process.poll() is None, f"its process ended before {what}\n{evidence()}"
        now = time.monotonic()
        assert now - begun < seconds, f"not within {seconds:g} s: {what}\n{evidence()}"
        time.sleep(max(0.02, 4 * (now - asked)))  # asking takes a fifth of the time at most
        asked = time.monotonic()
    return found
