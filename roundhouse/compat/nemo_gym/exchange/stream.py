"""Many rollouts at once, handed on as they finish.

Invariants: each row gives exactly one outcome; no more than `concurrency` are in flight, and no work exists for rows not yet
begun; a row that fails is an outcome and ends nothing; when the consumer stops early, what is in flight is cancelled and
awaited. Where the source cannot be reached at all, rows not begun are handed back untried instead of failing one by one.

    async with source:
        async for outcome in stream(rows, source, concurrency=64):     in the order of completion
            …
    results = await run_rollouts(rows, source, concurrency=64)         in the order of the rows
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, Self

from roundhouse.compat.nemo_gym.exchange.json_lines import Row
from roundhouse.errors import DataError, InfraError
from roundhouse.rollout.failures import classify
from roundhouse.rollout.plan import reorder
from roundhouse.trajectories.records import FailureKind

log = logging.getLogger(__name__)

SMALLEST_OUTAGE = 4
"""Rows in a row that find nobody, at any concurrency, before the others are not tried."""


class NotReached(InfraError):
    """The row never got to the source: it costs no attempt."""


class RolloutSource(Protocol):
    """Whatever plays task rows. An async context manager."""

    async def run(self, row: Row) -> Row:
        """Play a row (of the materialized inputs); the answer of `/run`.

        Raises:
            NotReached: nobody took the row.
            InfraError, DataError: it failed; another attempt may help, or will not.
        """
        ...

    async def aggregate(self, agent: str, rows: Sequence[Row]) -> Row:
        """The aggregate metrics of an agent's rollouts, without their conversations."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What became of a row."""

    index: int
    """Of the row."""
    row: Row
    result: Row | None = None
    error: Exception | None = None
    """Instead of a result."""

    @property
    def reached(self) -> bool:
        return not isinstance(self.error, NotReached)

    @property
    def final(self) -> bool:
        """The failure is the data's: trying again fails in the same way."""
        return self.error is not None and classify(self.error)[0] is FailureKind.DATA


async def stream(
    rows: Sequence[Row], source: RolloutSource, concurrency: int | None
) -> AsyncGenerator[RowOutcome, None]:
    """The outcomes of `rows` in the order of completion; all rows at once where `concurrency` is None."""
    concurrency = concurrency or max(1, len(rows))
    queue: Iterator[tuple[int, Row]] = iter(enumerate(rows))
    finished: asyncio.Queue[RowOutcome] = asyncio.Queue(maxsize=concurrency)
    outage = _Outage(concurrency)

    async def work() -> None:
        for index, row in queue:
            outcome = outage.untried(index, row) or await _outcome(index, row, source)
            outage.record(outcome)
            await finished.put(outcome)

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(rows)))]
    try:
        for _ in rows:
            yield await finished.get()
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def run_rollouts(rows: Sequence[Row], source: RolloutSource, concurrency: int | None) -> list[RowOutcome]:
    """The outcomes of `rows` in their order.

    Raises:
        ReorderError: a row has no outcome, or more than one.
    """
    async with aclosing(stream(rows, source, concurrency)) as outcomes:
        return reorder([(outcome.index, outcome) async for outcome in outcomes], len(rows))


async def _outcome(index: int, row: Row, source: RolloutSource) -> RowOutcome:
    try:
        return RowOutcome(index, row, await source.run(row))
    except (InfraError, DataError) as error:
        return RowOutcome(index, row, error=error)
    except Exception as error:  # a defect costs this row, not the others
        log.exception("Row %d ended with a defect", index)
        return RowOutcome(index, row, error=error)


class _Outage:
    """Opens when a whole wave in a row was not reached; stays open."""

    def __init__(self, concurrency: int) -> None:
        self._threshold = max(concurrency, SMALLEST_OUTAGE)
        self._in_a_row = 0
        self._cause: Exception | None = None

    def record(self, outcome: RowOutcome) -> None:
        self._in_a_row = 0 if outcome.reached else self._in_a_row + 1
        if self._in_a_row >= self._threshold and self._cause is None:
            self._cause = outcome.error

    def untried(self, index: int, row: Row) -> RowOutcome | None:
        if self._cause is None:
            return None
        return RowOutcome(index, row, error=NotReached(f"Not tried: {self._threshold} rows before it. {self._cause}"))
