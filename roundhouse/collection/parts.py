"""The parts of a collect stage: what its attempts have written so far, and what the newest one writes.

    rollouts-a0002-00003.parquet, turns-…    finished rollouts with their turns; the manifest names those of the last attempt
    journal-a0002-00001.parquet              finished model calls of unfinished rollouts; in no manifest, deleted after it
    rollouts-a0002-s0001of0004-01-00003…     the same of shard 1 of 4 (`roundhouse.collection.shards`), journal-… too

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
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roundhouse.collection.shards import Shard
from roundhouse.errors import StoreError
from roundhouse.rollout.journal import TurnJournal
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.replay import JOURNAL
from roundhouse.store.location import Location
from roundhouse.store.manifest import FileEntry, Reference
from roundhouse.store.stage import Attempt, Stage, read_part
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import ROLLOUTS, TURNS, rollouts_from_tables, rollouts_table, turns_table

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
"""Finished rollouts and model calls wait at most this long in memory: what a crash can cost."""
SHORTEST_SECONDS = 0.01
"""Between two looks at what waits, however short the time above."""


class Parts:
    """Of the stage of `attempt`, which writes the next ones. Those of earlier attempts are read here, once."""

    def __init__(
        self, attempt: Attempt, policy_version: int, oldest_version: int | None = None, shard: Shard | None = None
    ) -> None:
        """`policy_version` is the one that is collected; where older ones may be too, those from `oldest_version` on. With
        `shard`, only its rollouts are looked for among earlier parts."""
        self.attempt = attempt
        self.policy_version = policy_version
        self.journal = TurnJournal(policy_version, oldest_version)
        """Records the model calls of rollouts in flight, and knows those that earlier attempts finished."""
        self._location = attempt.stage.location
        self._earlier: dict[str, Rollout] = {}
        self._journal_names: list[str] = []
        self._own_journal: list[str] = []
        self._waiting: list[Rollout] = []
        self._flushed_at = time.monotonic()
        names = [name for name in self._location.names() if name.endswith(".parquet")]
        if shard is not None:
            names = [name for name in names if shard.may_be_in(name)]
        spent = set()
        for name in _of("rollouts", names):
            rollouts = read_part(self._location, name, ROLLOUTS)
            turns = read_part(self._location, "turns-" + name.removeprefix("rollouts-"), TURNS)
            if rollouts is None or turns is None:  # either cannot be trusted
                continue
            for rollout in rollouts_from_tables(rollouts, turns):
                if shard is not None and rollout.rollout_id not in shard.rollout_ids:
                    continue
                if oldest_version is not None and any(turn.policy_version < oldest_version for turn in rollout.turns):
                    continue
                if rollout.status is not Status.FAILED:
                    self._earlier[rollout.rollout_id] = rollout
                elif rollout.failure_kind is FailureKind.DATA:
                    spent.add(rollout.rollout_id)
        self._journal_names = _of("journal", names)
        for name in self._journal_names:
            if (part := read_part(self._location, name, JOURNAL)) is not None:
                if shard is not None:
                    own = pa.array(sorted(shard.rollout_ids), pa.string())
                    part = part.filter(pc.is_in(part["rollout_id"], value_set=own))
                self.journal.read(part, leave_out=spent | self._earlier.keys())

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
            name = f"journal-a{self.attempt.name}-{len(self._own_journal):05d}.parquet"
            self._own_journal.append(name)
            self._location.write(name, journal_parquet(calls))
        self._flushed_at = time.monotonic()

    def settle(self, rollouts: Sequence[Rollout]) -> list[FileEntry]:
        """The files of all these rollouts, which are what this attempt was for: as one part, where there were several. Its own
        journal goes with them, unless another attempt could use what it says."""
        written = self.attempt.files
        spent = [] if any(r.failure_kind is FailureKind.INFRA for r in rollouts) else self._own_journal
        if len(written) > len(("turns", "rollouts")):
            spent = [*spent, *(entry.path for entry in written)]
            tables = (("turns", turns_table(rollouts)), ("rollouts", rollouts_table(rollouts)))
            written = [self.attempt.write_table(dataset, table) for dataset, table in tables]
        self._delete(spent)
        return written

    def charge(self, cpu_seconds: float) -> None:
        self.attempt.charge(cpu_seconds)

    def metrics(self) -> dict[str, float]:
        return self.journal.resumptions.metrics()

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        """Make the stage complete; its details say how interrupted rollouts went on. The journal has served then."""
        recorded = details | {"resumptions": self.journal.resumptions.details()}
        reference = self.attempt.commit(inputs=inputs, counts=counts, metrics=metrics, details=recorded)
        self._delete([*self._journal_names, *self._own_journal])
        return reference

    def _delete(self, names: Iterable[str]) -> None:
        try:
            for name in names:
                self._location.delete(name)
        except StoreError as error:  # nothing depends on it, and `roundhouse store gc` finds the rest
            log.warning("Parts that have served stay: %s", error)

    @asynccontextmanager
    async def flushing(self) -> AsyncIterator[None]:
        """Flush every `FLUSH_SECONDS` in this event loop. What the store refuses ends the work inside."""

        async def again_and_again() -> None:
            while True:
                await asyncio.sleep(max(FLUSH_SECONDS, SHORTEST_SECONDS))
                self.flush()

        try:
            async with asyncio.TaskGroup() as group:
                clock = group.create_task(again_and_again())
                yield
                clock.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _of(dataset: str, names: Iterable[str]) -> list[str]:
    """The parts of a dataset, in the order in which they were written."""
    return sorted(name for name in names if name.startswith(f"{dataset}-"))


def journal_parquet(calls: pa.Table) -> bytes:
    """A journal's part as a file. Token IDs and log-probabilities hardly repeat: a dictionary would cost four times the CPU."""
    sink = io.BytesIO()
    pq.write_table(calls, sink, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return sink.getvalue()


def written_rollouts(stage: Location) -> list[Rollout]:
    """The rollouts in a collect stage's directory, complete or not; of one written twice, the one that did not fail, else the
    newest. Turns are written before rollouts, so a rollout that is there has its turns."""
    found: dict[str, Rollout] = {}
    for name in sorted(name for name in stage.names() if name.startswith("rollouts-") and name.endswith(".parquet")):
        rollouts = read_part(stage, name, ROLLOUTS)
        turns = read_part(stage, "turns-" + name.removeprefix("rollouts-"), TURNS)
        if rollouts is None or turns is None:  # damaged: what it held is rolled out again
            continue
        for rollout in rollouts_from_tables(rollouts, turns):
            before = found.get(rollout.rollout_id)
            if before is None or before.status is Status.FAILED or rollout.status is not Status.FAILED:
                found[rollout.rollout_id] = rollout
    return sorted(found.values(), key=lambda rollout: (rollout.group_id, rollout.sample))


def by_id(stage: Stage) -> dict[str, Rollout]:
    """`written_rollouts` by their id."""
    return {rollout.rollout_id: rollout for rollout in written_rollouts(stage.location)}
