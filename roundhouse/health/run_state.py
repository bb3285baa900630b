"""What became of a run, in one word, from its store alone.

finished       all its iterations are done
running        a process holds its lease
failed         its process ended with an error
stopped        its process ended before the last iteration: suspended, cancelled, or interrupted by a person
crashed        its process is gone without a word; the same command goes on where it stopped
not started    it was created, and no process has worked on it
"""

from __future__ import annotations

from typing import Literal

from roundhouse.health.heartbeat import read_beat
from roundhouse.store import lease
from roundhouse.store.run import Run

State = Literal["finished", "running", "failed", "stopped", "crashed", "not started"]


def state_of(run: Run) -> State:
    """What the run is doing now, or what it came to."""
    if lease.holder(run.location) is not None:
        return "running"
    if (summary := run.summary()) is not None and summary["iterations"] >= run.config.iterations:
        return "finished"
    beat = read_beat(run.location)
    if beat is None:
        return "not started"
    if not beat.ended:
        return "crashed"
    return "failed" if beat.health.status == "error" else "stopped"
