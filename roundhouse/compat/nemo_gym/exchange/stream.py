"""Many rollouts at once, handed on as they finish.

Invariants: each row gives exactly one outcome; no more than `concurrency` are in flight, and no work exists for rows not yet
begun; a row that fails is an outcome and ends nothing; when the consumer stops early, what is in flight is cancelled and
awaited. Where the source cannot be reached at all, rows not begun are handed back untried instead of failing one by one.

    async with source:
        async for outcome in stream(rows, source, concurrency=64):     in the order of completion
            …
    results = await run_rollouts(rows, source, concurrency=64)         in the order of the rows

What a collection still has to do: a pure difference of wanted and done.

Invariant: a rollout that was written is not made again; one that failed for good, or as often as is allowed, is not tried
again; everything else is.

    wanted a/0 a/1 b/0 b/1, rollouts a/0, failures a/1 (3 times) b/0 (terminal) b/1 (once)
        ->  to run b/1, its `_ng_attempt_index` 1
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, Self

from roundhouse.compat.nemo_gym.exchange.json_lines import Row
from roundhouse.compat.nemo_gym.exchange.outgoing import ATTEMPT, is_index
from roundhouse.compat.nemo_gym.servers.aggregate import ROLLOUT, TASK
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.rollout.failures import TERMINAL, classify
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


MAX_ATTEMPTS = 3
MAX_ATTEMPTS_VARIABLE = "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS"

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rows to run, and why the others are not."""

    rows: list[Row]
    done: int = 0
    terminal: int = 0
    """Failed for good."""
    exhausted: int = 0
    """Failed as often as is allowed."""


def remaining(
    wanted: Sequence[Row], done: Iterable[Row], failures: Iterable[Row], max_attempts: int = MAX_ATTEMPTS
) -> Remaining:
    """What of `wanted` (materialized inputs) is still to be run; failed rows get the number of their next attempt."""
    finished = {key_of(row) for row in done}
    attempts: Counter[Key] = Counter()
    terminal: set[Key] = set()
    for row in failures:
        if is_index(row.get(TASK)) and is_index(row.get(ROLLOUT)):
            attempts[key_of(row)] += 1
            if row.get(TERMINAL):
                terminal.add(key_of(row))
    rows = []
    counts: Counter[str] = Counter()
    for row in wanted:
        key = key_of(row)
        tried = attempts[key]
        if key in finished:
            counts["done"] += 1
        elif key in terminal:
            counts["terminal"] += 1
        elif tried >= max_attempts:
            counts["exhausted"] += 1
        else:
            rows.append(row | {ATTEMPT: tried} if tried else row)
    return Remaining(rows, counts["done"], counts["terminal"], counts["exhausted"])


def key_of(row: Row) -> Key:
    return row[TASK], row[ROLLOUT]


def max_attempts(environ: Mapping[str, str] = os.environ) -> int:
    """Attempts at a rollout, over all resumes, as NEMO_GYM_MAX_ROLLOUT_ATTEMPTS says; 3 when it is unset.

    Raises:
        ConfigError: it is no whole number from 1.
    """
    text = environ.get(MAX_ATTEMPTS_VARIABLE) or str(MAX_ATTEMPTS)
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{MAX_ATTEMPTS_VARIABLE} is {text!r}: give a whole number from 1, or unset it.")
    return int(text)
