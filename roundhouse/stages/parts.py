"""The parts of a collect stage: what its attempts have written so far, and what the newest one writes.

    rollouts-a0002-00003.parquet, turns-…    finished rollouts with their turns; the manifest names those of the last attempt
    journal-a0002-00001.parquet              finished model calls of unfinished rollouts; in no manifest, deleted after it

Invariants: a rollout in the store has its turns there, since they are written first; what happened longer than `FLUSH_SECONDS`
ago is in the store; a part that is damaged, or not listed yet, is left out, and what it held is made anew under the same seeds.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse.errors import StoreError
from roundhouse.gym.journal import Journal
from roundhouse.gym.plan import RolloutSpec
from roundhouse.gym.recorded_calls import JOURNAL
from roundhouse.store.manifest import Reference
from roundhouse.store.stage import Attempt, read_part
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import ROLLOUTS, TURNS, rollouts_from_tables, rollouts_table, turns_table

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""Finished rollouts and model calls wait at most this long in memory: what a crash can cost."""
SHORTEST_SECONDS = 0.01
"""Between two looks at what waits, however short the time above."""


class Parts:
    """Of the stage of `attempt`, which writes the next ones. Those of earlier attempts are read here, once."""

    def __init__(self, attempt: Attempt, policy_version: int, oldest_version: int | None = None) -> None:
        """`policy_version` is the one that is collected; where older ones may be too, those from `oldest_version` on."""
        self.attempt = attempt
        self.policy_version = policy_version
        self.journal = Journal(policy_version, oldest_version)
        """Records the model calls of rollouts in flight, and knows those that earlier attempts finished."""
        self._location = attempt.stage.location
        self._earlier: dict[str, Rollout] = {}
        self._journal_names: list[str] = []
        self._journal_parts = 0
        self._waiting: list[Rollout] = []
        self._flushed_at = time.monotonic()
        self._read()

    def keep(self, specs: Sequence[RolloutSpec]) -> dict[str, Rollout]:
        """Take over those rollouts of `specs` that an earlier attempt finished; by id. Failed ones are to be tried again."""
        ids = [spec.rollout_id for spec in specs]
        kept = {id: self._earlier.pop(id) for id in ids if id in self._earlier}
        self._waiting.extend(kept.values())
        return kept

    def add(self, rollout: Rollout) -> None:
        """A rollout has its outcome."""
        self.journal.finished(rollout)
        self._waiting.append(rollout)
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write down what happened since the last time."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.attempt.write_table("turns", turns_table(waiting))
            self.attempt.write_table("rollouts", rollouts_table(waiting))
        if (calls := self.journal.take()) is not None:
            self._write_journal(calls)
        self._flushed_at = time.monotonic()

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        """Make the stage complete; its details say how interrupted rollouts went on. The journal has served then."""
        told = details | {"resumptions": self.journal.resumptions.details()}
        reference = self.attempt.commit(inputs=inputs, counts=counts, metrics=metrics, details=told)
        try:
            for name in self._journal_names:
                self._location.delete(name)
        except StoreError as error:  # the stage is complete all the same, and `roundhouse store gc` finds the rest
            log.warning("The journal of a complete stage stays: %s", error)
        return reference

    @asynccontextmanager
    async def flushing(self) -> AsyncIterator[None]:
        """Flush every `FLUSH_SECONDS` in this event loop. What the store refuses ends the work inside."""
        try:
            async with asyncio.TaskGroup() as group:
                clock = group.create_task(self._flush_again_and_again())
                yield
                clock.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _flush_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(max(FLUSH_SECONDS, SHORTEST_SECONDS))
            self.flush()

    def _write_journal(self, calls: pa.Table) -> None:
        name = f"journal-a{self.attempt.number:04d}-{self._journal_parts:05d}.parquet"
        self._journal_parts += 1
        self._journal_names.append(name)
        self._location.write(name, journal_parquet(calls))

    def _read(self) -> None:
        names = [name for name in self._location.names() if name.endswith(".parquet")]
        spent = set()
        for name in _of("rollouts", names):
            for rollout in self._rollouts_in(name):
                if rollout.status is not Status.FAILED:
                    self._earlier[rollout.rollout_id] = rollout
                elif rollout.failure_kind is FailureKind.DATA:
                    spent.add(rollout.rollout_id)
        self._journal_names = _of("journal", names)
        for name in self._journal_names:
            if (part := read_part(self._location, name, JOURNAL)) is not None:
                self.journal.read(part, leave_out=spent | self._earlier.keys())

    def _rollouts_in(self, name: str) -> list[Rollout]:
        """The rollouts of a part and its turns; none when either cannot be trusted."""
        rollouts = read_part(self._location, name, ROLLOUTS)
        turns = read_part(self._location, "turns-" + name.removeprefix("rollouts-"), TURNS)
        return [] if rollouts is None or turns is None else rollouts_from_tables(rollouts, turns)


def _of(dataset: str, names: Iterable[str]) -> list[str]:
    """The parts of a dataset, in the order in which they were written."""
    return sorted(name for name in names if name.startswith(f"{dataset}-"))


def journal_parquet(calls: pa.Table) -> bytes:
    """A journal's part as a file. Token IDs and log-probabilities hardly repeat: a dictionary would cost four times the CPU."""
    sink = io.BytesIO()
    pq.write_table(calls, sink, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return sink.getvalue()
