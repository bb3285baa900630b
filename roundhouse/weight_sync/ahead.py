"""Work on pieces in a few threads; numpy and zstd let go of the interpreter while they count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(threads: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in the order of the items; no more than `threads` + 1 items are taken ahead of what was handed out."""
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[R]] = deque()
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
