"""What a stage that collects in this process writes meanwhile, and its metrics.

Invariant: `commit` makes exactly the rollouts that were kept or added the stage's datasets, once each, also after writes that
failed: what could not be written is held and written the next time.

    rollouts-a0002-00003.parquet, turns-…    finished rollouts with their turns; the manifest names those of the last attempt
    journal-a0002-00001.parquet              finished model calls of unfinished rollouts; in no manifest, deleted after it
    rollouts-a0002-s0001of0004-01-00003…     the same of shard 1 of 4 (`roundhouse.collection.shards`), journal-… too

A rollout in the store has its turns there, since they are written first; what happened longer than `FLUSH_SECONDS` ago is in
the store; a part that is damaged, or not listed yet, is left out, and what it held is made anew under the same seeds.

Denominators of the metrics: `reward/*` over rewarded rollouts (failed ones have none); `rollout/*` over rollouts that made at
least one model call; rates over all requested ones.
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
from roundhouse.config.environments import MixtureEnvironment
from roundhouse.config.models import RolloutConfig, RunConfig
from roundhouse.errors import StoreError, TooFewRollouts
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.replay import JOURNAL, TurnJournal
from roundhouse.store.location import Location
from roundhouse.store.stage import Attempt, FileEntry, Reference, Stage, read_part
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from roundhouse.trajectories.schemas import ROLLOUTS, TURNS, rollouts_from_tables, rollouts_table, turns_table

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
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
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
    kinds = Counter(f"failures/{rollout.failure_kind or 'unknown'}" for rollout in failed)
    codes = Counter(f"failures/code/{rollout.failure_code or 'unknown'}" for rollout in failed)
    metrics |= {name: float(count) for name, count in sorted((kinds + codes).items())}
    reported: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            reported.setdefault(f"environment/{name}", []).append(value)
        for name, value in rollout.reward_components.items():
            reported.setdefault(f"reward/{name}", []).append(value)
    return metrics | {name: mean(values) for name, values in sorted(reported.items())}


def metrics_by_environment(config: RunConfig, rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """The metrics of each environment of a mixture's rollouts, under `<prefix><environment>/`; of one environment none."""
    if not isinstance(config.environment, MixtureEnvironment):
        return {}
    return {
        f"{prefix}{name}/{metric}": value
        for name in config.environment.environments
        for metric, value in rollout_metrics(
            [each for each in rollouts if each.group_id.startswith(f"{name}/")]
        ).items()
    }


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))


def refuse_many_failures(rollouts: Sequence[Rollout], config: RolloutConfig, engine_url: str) -> None:
    """
    Raises:
        TooFewRollouts: a larger share than `rollout.max_failed_fraction` failed.
    """
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    if len(failed) <= config.max_failed_fraction * len(rollouts):
        return
    first = failed[0]
    raise TooFewRollouts(
        f"{len(failed)} of {len(rollouts)} rollouts failed, more than rollout.max_failed_fraction="
        f"{config.max_failed_fraction} allows. The first: {first.failure_code}: {first.failure_detail} (engine: {engine_url}). "
        "What finished is kept; the next attempt generates only the rest."
    )


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
        self._unwritten: list[tuple[str, pa.Table]] = []
        """Tables with their dataset, in the order in which they are to be written."""
        self._adding = threading.Lock()
        """A further round is begun, and the stage committed, in another thread than that which adds and flushes."""
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
        kept = {id: self._earlier.pop(id) for id in ids if id in self._earlier}
        with self._adding:
            self._waiting.extend(kept.values())
        return kept

    def add(self, rollout: Rollout) -> None:
        """A rollout has its outcome."""
        self.journal.finished(rollout)
        with self._adding:
            self._waiting.append(rollout)
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write down what happened since the last time."""
        with self._adding:
            self._write_rollouts()
            if (calls := self.journal.take()) is not None:
                self._unwritten.append(("journal", calls))
                self._write()
        self._flushed_at = time.monotonic()

    def _write_rollouts(self) -> None:
        if self._waiting:
            self._unwritten += [("turns", turns_table(self._waiting)), ("rollouts", rollouts_table(self._waiting))]
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
        """Make the stage complete; its details say how interrupted rollouts were resumed. Ends the journal's use."""
        with self._adding:  # what a runner could not write down before it ended
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
