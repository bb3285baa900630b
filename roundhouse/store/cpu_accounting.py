"""CPU seconds of this process, attributed to the stages that it runs.

Invariant: a second that a thread spends within `attribute_to_this_stage` counts for the stage of that thread alone; all others
count for the stage that measures the process. So the seconds of stages that run concurrently in several threads add up.

    with attribute_to_this_stage():   in each thread of a stage that runs concurrently with others
        seconds = clock()             of this thread here; of the process without such threads elsewhere
        seconds() - seconds()

What a thread within the block lets other threads compute is attributed to the process. Where the system does not report one
thread's CPU time to others (Linux does), it is subtracted from the process's when the thread leaves the block.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]

_lock = threading.Lock()
_ended = 0.0
"""Seconds of threads that have left the block."""
_at_work: dict[int, tuple[int | None, float]] = {}
"""By thread within the block: its clock, and what this said at the beginning."""


@contextmanager
def attribute_to_this_stage() -> Iterator[None]:
    """This thread works for a stage of its own, concurrently with others; within another such block nothing changes."""
    global _ended
    thread = threading.get_ident()
    if thread in _at_work:
        yield
        return
    find_clock = getattr(time, "pthread_getcpuclockid", None)
    began = time.thread_time()
    with _lock:
        _at_work[thread] = (find_clock(thread) if find_clock else None, began)
    try:
        yield
    finally:
        with _lock:
            del _at_work[thread]
            _ended += time.thread_time() - began


def clock() -> Clock:
    """What measures a stage that this thread begins."""
    return time.thread_time if threading.get_ident() in _at_work else process_seconds


def process_seconds() -> float:
    """CPU seconds of this process, without the threads within `attribute_to_this_stage`."""
    with _lock:
        elsewhere = _ended + sum(
            time.clock_gettime(found) - began for found, began in _at_work.values() if found is not None
        )
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime - elsewhere
