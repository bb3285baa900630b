"""Growth of a function's CPU time with its input: a ratio that is independent of the machine's speed and load."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread in `work`: the smallest of three calls."""
    seconds = []
    for _ in range(3):
        begun = time.thread_time()
        work()
        seconds.append(time.thread_time() - begun)
    return min(seconds)


def growth(work: Callable[[int], object], size: int) -> float:
    """Return the ratio of the CPU times of `work(8 * size)` and `work(size)`: about 8 if it is linear, 64 if quadratic."""
    work(size)  # the first call imports and fills caches
    return cpu_seconds(lambda: work(8 * size)) / cpu_seconds(lambda: work(size))
