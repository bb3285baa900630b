"""Files of a stage that collects in this process, and the stage's metrics.

Invariant: `commit` publishes exactly the kept and added rollouts as the stage's datasets, once each, also after failed
writes: rows that could not be written are kept in memory and written the next time.

    rollouts-a0002-00003.parquet, turns-…    finished rollouts with their turns; the manifest names those of the last attempt
    journal-a0002-00001.parquet              finished model calls of unfinished rollouts; in no manifest, deleted after it
    rollouts-a0002-s0001of0004-01-00003…     the same of shard 1 of 4 (`roundhouse.collection.shards`), journal-… too

Turns are written before rollouts, so a stored rollout has its turns. Everything older than `FLUSH_SECONDS` is stored. A
damaged or unlisted part is skipped, and its rollouts are made again with the same seeds.

Denominators of the metrics: `reward/*` and `environment/*` count completed and truncated rollouts (failed ones are not
rewarded, masked ones do not count); `rollout/*` counts rollouts with at least one model call; rates count all requested
rollouts.
"""

from __future__ import annotations

import io
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roundhouse.collection.shards import Shard
from roundhouse.config.models import RolloutConfig, RunConfig
from roundhouse.errors import FailingRollouts, StoreError, TooFewRollouts
from roundhouse.rollout.agents import METRICS_LEFT_OUT, MOST_NAMES
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.replay import JOURNAL, TurnJournal
from roundhouse.store.location import Location
from roundhouse.store.stage import Attempt, FileEntry, Reference, Stage, read_part
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import (
    ROLLOUTS,
    TURNS,
    RolloutTables,
    recorded_rollout,
    rollouts_from_tables,
    tables_of,
)
from roundhouse.trajectories.uneven_failures import outcomes_of, uneven_failures

Progress = Callable[[int, int], None]
"""Called with (finished, planned)."""


@dataclass(frozen=True)
class Collected:
    """All planned rollouts, in the plan's order."""

    rollouts: list[Rollout]
    """Collected elsewhere, they are here without words and token IDs (`trajectories.outlines`)."""
    window_seconds: float
    """Wall time in which rollouts ran: engine, environment and agent loop together."""
    branches: Sequence[Rollout] = ()
    """Made in that time, too. They begin amid a task, so that only the rate of tokens counts them."""

    def metrics(self) -> dict[str, float]:
        generated = sum(rollout.generated_tokens for rollout in (*self.rollouts, *self.branches))
        rates = {"rollout/tokens_per_second": generated / self.window_seconds} if self.window_seconds > 0 else {}
        return rollout_metrics(self.rollouts) | {"time/rollouts": self.window_seconds} | rates


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Reward, lengths and outcome rates."""
    counted = [rollout for rollout in rollouts if rollout.status.counted]
    rewards = [rollout.reward for rollout in counted if rollout.reward is not None]
    started = [rollout for rollout in rollouts if rollout.turns]
    generated = [rollout.generated_tokens for rollout in started]
    total = [rollout.turns[-1].prompt_length + len(rollout.turns[-1].generation_token_ids) for rollout in started]
    metrics: dict[str, float] = {}
    if rewards:
        metrics |= {
            "reward/mean": mean(rewards),
            "reward/std": deviation(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            "reward/above_lowest": float(sum(reward > min(0.0, *rewards) for reward in rewards)),
        }
    if started:
        metrics |= {
            "rollout/turns_mean": mean([len(rollout.turns) for rollout in started]),
            "rollout/generated_tokens_mean": mean(generated),
            "rollout/generated_tokens_max": max(generated),
            "rollout/total_tokens_mean": mean(total),
            "rollout/total_tokens_max": max(total),
            "rollout/generated_tokens": float(sum(generated)),
            "rollout/seconds_mean": mean([rollout.seconds for rollout in started]),
            "rollout/seconds_max": max(rollout.seconds for rollout in started),
            "rollout/generation_seconds_mean": mean([rollout.generation_seconds for rollout in started]),
            "rollout/environment_seconds_mean": mean([rollout.environment_seconds for rollout in started]),
        }
    if rollouts:
        for status in Status:
            metrics[f"rollout/{status.value}_rate"] = mean([float(rollout.status is status) for rollout in rollouts])
    if audited := [rollout.metrics["audit_agrees"] for rollout in rollouts if "audit_agrees" in rollout.metrics]:
        metrics |= {"audit/rollouts": float(len(audited)), "audit/refused": float(audited.count(0.0))}
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    if failed:
        metrics |= {
            f"uneven_failures/{name}": chance for name, chance in uneven_failures(outcomes_of(rollouts)).items()
        }
    kinds = Counter(f"failures/{rollout.failure_kind or 'unknown'}" for rollout in failed)
    codes = Counter(f"failures/code/{rollout.failure_code or 'unknown'}" for rollout in failed)
    metrics |= {name: float(count) for name, count in sorted((kinds + codes).items())}
    return metrics | _reported_means(counted)


def _reported_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the means of reward components and environment metrics, each over the rollouts that report it. Of more
    than `MOST_NAMES` names, keep the most frequent. `rollout/metrics_left_out` counts the omitted values."""
    reported: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            if name != METRICS_LEFT_OUT:
                reported.setdefault(f"environment/{name}", []).append(value)
        for name, value in rollout.reward_components.items():
            reported.setdefault(f"reward/{name}", []).append(value)
    names = sorted(reported, key=lambda name: (-len(reported[name]), name))
    left_out = math.fsum(rollout.metrics.get(METRICS_LEFT_OUT, 0.0) for rollout in rollouts)
    left_out += sum(len(reported[name]) for name in names[MOST_NAMES:])
    means = {name: mean(reported[name]) for name in sorted(names[:MOST_NAMES])}
    return means | ({"rollout/metrics_left_out": left_out} if left_out else {})


def metrics_by_environment(config: RunConfig, rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """The metrics of each environment of a mixture's rollouts, under `<prefix><environment>/`; of one environment none."""
    return {
        f"{prefix}{name}/{metric}": value
        for name in config.environment.parts
        for metric, value in rollout_metrics(
            [each for each in rollouts if each.group_id.startswith(f"{name}/")]
        ).items()
    }


def mean(values: Sequence[float]) -> float:
    """Mean of finite numbers of any size."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value. Squares of large numbers do not overflow (`math.hypot` scales them)."""
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.hypot(*(value - center for value in values)) / math.sqrt(len(values) - 1)


def refuse_many_failures(rollouts: Sequence[Rollout], config: RolloutConfig, engine_url: str) -> None:
    """
    Raises:
        TooFewRollouts: a larger share than `rollout.max_failed_fraction` failed; another attempt may succeed.
        FailingRollouts: the same, and all of them failed by their data: another attempt fails in the same way.
    """
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    if len(failed) <= config.max_failed_fraction * len(rollouts):
        return
    first = failed[0]
    many = (
        f"{len(failed)} of {len(rollouts)} rollouts failed, more than rollout.max_failed_fraction="
        f"{config.max_failed_fraction} allows. The first: {first.failure_code}: {first.failure_detail}"
    )
    if all(rollout.failure_kind is FailureKind.DATA for rollout in failed):
        raise FailingRollouts(
            f"{many}. All of them failed by their data, and another attempt would fail again. Correct the cause, then start "
            "the run again. Finished rollouts are kept; only the rest is generated."
        )
    raise TooFewRollouts(
        f"{many} (engine: {engine_url}). Finished rollouts are kept; the next attempt generates only the rest."
    )


log = logging.getLogger(__name__)


FLUSH_SECONDS = 5.0
"""Longest time that finished rollouts and model calls wait in memory: the most that a crash can lose."""


SHORTEST_SECONDS = 0.01
"""Shortest time between two checks of the waiting rows."""


class Parts:
    """Parts of a stage: earlier attempts' parts, read once, and new parts of `attempt`."""

    def __init__(
        self, attempt: Attempt, policy_version: int, oldest_version: int | None = None, shard: Shard | None = None
    ) -> None:
        """Open the parts of a stage.

        Args:
            policy_version: the collected version.
            oldest_version: also accept calls of versions from this one on.
            shard: read only this shard's rollouts from earlier parts.
        """
        self.attempt = attempt
        self.policy_version = policy_version
        self.journal = TurnJournal(policy_version, oldest_version)
        """Journal of model calls: records those of rollouts in flight, and holds finished calls of earlier attempts."""
        self._location = attempt.stage.location
        self._earlier: dict[str, Rollout] = {}
        self._journal_names: list[str] = []
        self._own_journal: list[str] = []
        self._waiting: list[RolloutTables] = []
        """Tables are made when a rollout finishes, so a rollout that no table can hold fails alone, and later only the
        write can fail."""
        self._unwritten: list[tuple[str, pa.Table]] = []
        """Tables with their dataset, in the order in which they are to be written."""
        self._adding = threading.Lock()
        """Guards against a second thread: one begins rounds and commits, another adds and flushes."""
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

    def finished(self, specs: Sequence[RolloutSpec]) -> Collection[str]:
        """Ids of those of these rollouts that an earlier attempt finished."""
        return {spec.rollout_id for spec in specs if spec.rollout_id in self._earlier}

    def keep(self, specs: Sequence[RolloutSpec]) -> dict[str, Rollout]:
        """Take over those rollouts of `specs` that an earlier attempt finished; by id. Failed ones are to be tried again."""
        ids = [spec.rollout_id for spec in specs]
        rollouts = {id: self._earlier.pop(id) for id in ids if id in self._earlier}
        if rollouts:
            tables = tables_of(list(rollouts.values()))
            with self._adding:
                self._waiting.append(tables)
        return rollouts

    def add(self, rollout: Rollout) -> Rollout:
        """Take a rollout with its outcome; return it as it is recorded (`schemas.recorded_rollout`)."""
        rollout, tables = recorded_rollout(rollout)
        self.journal.finished(rollout)
        with self._adding:
            self._waiting.append(tables)
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()
        return rollout

    def flush(self) -> None:
        """Write all rows that are not written yet."""
        with self._adding:
            self._write_rollouts()
            if (calls := self.journal.take()) is not None:
                self._unwritten.append(("journal", calls))
                self._write()
        self._flushed_at = time.monotonic()

    def _write_rollouts(self) -> None:
        if self._waiting:
            turns, rollouts = (pa.concat_tables(tables).combine_chunks() for tables in zip(*self._waiting, strict=True))
            self._unwritten += [("turns", turns), ("rollouts", rollouts)]
            self._waiting = []
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            dataset, table = self._unwritten[0]
            if dataset == "journal":
                name = f"journal-a{self.attempt.name}-{len(self._own_journal):05d}.parquet"
                self._location.write(name, journal_parquet(table))
                self._own_journal.append(name)
            else:
                self.attempt.write_table(dataset, table)
            del self._unwritten[0]

    def settle(self, rollouts: Sequence[Rollout]) -> list[FileEntry]:
        """Return the files of all rollouts of this attempt, merged into one part. Delete the attempt's journal unless
        another attempt could use it."""
        written = self.attempt.files
        spent = [] if any(r.failure_kind is FailureKind.INFRA for r in rollouts) else self._own_journal
        if len(written) > len(("turns", "rollouts")):
            spent = [*spent, *(entry.path for entry in written)]
            tables = zip(("turns", "rollouts"), tables_of(rollouts), strict=True)
            written = [self.attempt.write_table(dataset, table) for dataset, table in tables]
        self._delete(spent)
        return written

    def whole(self, rollouts: Sequence[Rollout], groups: Collection[str]) -> list[Rollout]:
        return [each for each in rollouts if each.group_id in groups]

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
        """Complete the stage, with the counts of resumed rollouts in its details. The journal must not be used
        afterwards."""
        with self._adding:  # rows that a runner could not write before it ended
            self._write_rollouts()
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


def _of(dataset: str, names: Iterable[str]) -> list[str]:
    """The parts of a dataset, in the order in which they were written."""
    return sorted(name for name in names if name.startswith(f"{dataset}-"))


def journal_parquet(calls: pa.Table) -> bytes:
    """A journal's part as a file. Token IDs and log-probabilities hardly repeat: a dictionary would cost four times the CPU."""
    sink = io.BytesIO()
    pq.write_table(calls, sink, compression="zstd", use_dictionary=False, write_page_checksum=True)
    return sink.getvalue()


def written_rollouts(stage: Location) -> list[Rollout]:
    """Return the rollouts in a collect stage's directory, complete or not. Of duplicates, prefer a rollout without a
    failure, then the newest. Turns are written before rollouts, so each returned rollout has its turns."""
    rollouts_by_id: dict[str, Rollout] = {}
    for name in sorted(name for name in stage.names() if name.startswith("rollouts-") and name.endswith(".parquet")):
        rollouts = read_part(stage, name, ROLLOUTS)
        turns = read_part(stage, "turns-" + name.removeprefix("rollouts-"), TURNS)
        if rollouts is None or turns is None:  # damaged: its rollouts are made again
            continue
        for rollout in rollouts_from_tables(rollouts, turns):
            before = rollouts_by_id.get(rollout.rollout_id)
            if before is None or before.status is Status.FAILED or rollout.status is not Status.FAILED:
                rollouts_by_id[rollout.rollout_id] = rollout
    return sorted(rollouts_by_id.values(), key=lambda rollout: (rollout.group_id, rollout.sample))


def by_id(stage: Stage) -> dict[str, Rollout]:
    """`written_rollouts` by their id."""
    return {rollout.rollout_id: rollout for rollout in written_rollouts(stage.location)}
