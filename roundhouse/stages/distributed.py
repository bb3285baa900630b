"""A collection by several workers, each of which collects a shard of the plan as one process would all of it.

Invariant: what is committed is each planned rollout once, whoever collected it, and the ledgers of all shards add up to that of
the whole. A shard that has left its report is not collected again, by this attempt or a later one, unless rollouts of it
failed; one that was lost goes on with what it had written. When `collect` returns or raises, no worker is left at work.

    plan ── split ──┬── s0001of0003  report there ─────────────────┐
                    ├── s0002of0003  worker ── lost ── worker ── report ── adopt files, add ledgers ── one manifest
                    └── s0003of0003  worker ── report ─────────────┘
"""

from __future__ import annotations

import contextvars
import hashlib
import io
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from roundhouse.config.distribution import Shards, Together
from roundhouse.config.models import Sampling
from roundhouse.errors import InfraError, StoreError
from roundhouse.gym.journal import ResumptionCounts
from roundhouse.gym.plan import RolloutSpec, reorder
from roundhouse.health.activity import ACTIVITY
from roundhouse.health.watchdog import Interrupted
from roundhouse.stages.child_process import Stopped
from roundhouse.stages.collection import Collected, Progress
from roundhouse.stages.shard_spec import REPORT, ShardReport, ShardSpec, planned_groups
from roundhouse.stages.shard_worker import finished_in
from roundhouse.stages.shard_workers import ShardTask, Workers, workers_of
from roundhouse.stages.shards import Shard, shares, split
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import FileEntry, Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import WRITERS, Stage, read_entry
from roundhouse.trajectories.ledger import Ledger, LedgerError
from roundhouse.trajectories.outlines import outlines_from_tables
from roundhouse.trajectories.records import Rollout

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often progress is told, and an interruption noticed."""
FIRST_PAUSE_SECONDS = 1.0
"""Before a lost worker is started again; twice as long each time after."""


@dataclass(frozen=True)
class Outcome:
    """A shard that is whole."""

    label: str
    report: ShardReport
    rollouts: list[Rollout]
    """Outlines, in the plan's order."""
    fresh: bool
    """A worker of this attempt made it."""

    def details(self) -> dict[str, Any]:
        """For the manifest."""
        shown = self.report.model_dump(include={"attempt", "seconds", "cpu_seconds", "max_rss_mib"})
        return {"shard": self.label, **self.report.ledger.counts(), **shown}


class Distributed:
    """A `Collection` by the workers of `rollout.distribution`."""

    def __init__(self, run: Run, stage: Stage, policy_version: int) -> None:
        distribution = run.config.rollout.distribution
        assert isinstance(distribution, Shards), "who collects together needs no shards"
        self._run = run
        self._distribution = distribution
        self._stage = stage
        self._attempt = run.begin(stage, policy_version=policy_version)
        self._rounds = 0
        self._outcomes: list[Outcome] = []
        self._lost = 0
        self._cost: dict[str, float] = {}

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        self._rounds += 1
        shards = split(specs, self._distribution.shards)
        limits = shares(self._run.config.rollout.concurrency, len(shards))
        tasks = [
            self._task(shard, sampling, engine_url, on_policy, limit)
            for shard, limit in zip(shards, limits, strict=True)
        ]
        found = self._collected_before(shards, tasks)
        missing = [(shard, task) for shard, task in zip(shards, tasks, strict=True) if shard.label not in found]
        if missing:
            before = sum(len(outcome.rollouts) for outcome in found.values())
            with workers_of(self._run, [task for _, task in missing]) as workers:
                work = _Work(workers, self._distribution.restarts, before, len(specs), progress, self._outcome)
                found |= {outcome.label: outcome for outcome in work.carry_out(missing)}
                self._lost += work.lost
                for name, value in workers.metrics().items():
                    self._cost[name] = self._cost.get(name, 0.0) + value
        outcomes = [found[shard.label] for shard in shards]
        self._take(outcomes)
        seconds = max((outcome.report.seconds for outcome in outcomes if outcome.fresh), default=0.0)
        return Collected([rollout for outcome in outcomes for rollout in outcome.rollouts], seconds)

    def metrics(self) -> dict[str, float]:
        reports = [outcome.report for outcome in self._outcomes]
        return self._resumptions().metrics() | {
            "rollout/shards": float(len(reports)),
            "rollout/shards_lost": float(self._lost),
            "rollout/shard_cpu_seconds": sum(report.cpu_seconds for report in reports),
            **{f"rollout/{name}": value for name, value in self._cost.items()},
        }

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        told = {
            "resumptions": self._resumptions().details(),
            "distribution": {
                "kind": self._distribution.model_dump()["kind"],
                "shards": [outcome.details() for outcome in self._outcomes],
            },
        }
        reference = self._attempt.commit(inputs=inputs, counts=counts, metrics=metrics, details=details | told)
        self._clean()
        return reference

    def _task(self, shard: Shard, sampling: Sampling, engine_url: str, on_policy: bool, concurrency: int) -> ShardTask:
        config, provenance = self._run.config, self._attempt.provenance
        depends = f"{self._run.uid} {provenance.policy_version} {sampling} {on_policy} {shard.digest()}"
        name = f"{shard.label}-{self._rounds}-{hashlib.sha256(depends.encode()).hexdigest()[:12]}"
        place = self._stage.location / WRITERS / name
        rollout = config.rollout.model_copy(update={"concurrency": concurrency, "distribution": Together()})
        spec = ShardSpec(
            config=config.model_copy(update={"rollout": rollout}),
            sampling=sampling,
            on_policy=on_policy,
            engine_url=engine_url,
            provenance=provenance,
            stage=self._stage.location.uri,
            kind=self._stage.kind,
            iteration=self._stage.iteration,
            attempt=self._attempt.number,
            number=shard.number,
            count=shard.count,
            groups=planned_groups(shard),
            place=place.uri,
        )
        return ShardTask(spec, shard.label, _digest(place))

    def _collected_before(self, shards: Sequence[Shard], tasks: Sequence[ShardTask]) -> dict[str, Outcome]:
        """What earlier attempts left whole."""
        found = {}
        for shard, task in zip(shards, tasks, strict=True):
            if not task.after or (report := _read_report(task.place)) is None or report.ledger.failed:
                continue
            try:
                found[shard.label] = self._checked(shard, report, fresh=False)
            except StoreError as error:
                if isinstance(error, InfraError):
                    raise
                log.warning("%s is collected again: %s", shard.label, error)
        return found

    def _outcome(self, shard: Shard, task: ShardTask) -> Outcome:
        """What a worker left."""
        report = _read_report(task.place)
        if report is None:
            raise InfraError(f"The worker of {task.label} ended well, but {task.place.uri} has no whole report of it.")
        return self._checked(shard, report, fresh=True)

    def _checked(self, shard: Shard, report: ShardReport, *, fresh: bool) -> Outcome:
        """The outcome that a report tells, held against the plan and against the files that it names.

        Raises:
            StoreError: a file is gone or damaged.
            ReorderError, LedgerError: they hold other rollouts.
        """
        rollouts = outlines_from_tables(self._table(report, "rollouts"), self._table(report, "turns"))
        index = {spec.rollout_id: place for place, spec in enumerate(shard.specs)}
        ordered = reorder(((index.get(rollout.rollout_id, -1), rollout) for rollout in rollouts), len(index))
        if (counted := Ledger.from_rollouts(ordered, requested=len(shard.specs))) != report.ledger:
            raise LedgerError(f"{shard.label}: its report counts {report.ledger!r}, its files hold {counted!r}.")
        return Outcome(shard.label, report, ordered, fresh)

    def _table(self, report: ShardReport, dataset: str) -> pa.Table:
        entries = [entry for entry in report.files if entry.path.startswith(f"{dataset}-")]
        tables = [pq.read_table(io.BytesIO(read_entry(self._stage.location, entry))) for entry in entries]
        if not tables:
            raise StoreError(f"The report of a shard of {self._stage.location.uri} names no {dataset}.")
        return pa.concat_tables(tables)

    def _take(self, outcomes: Sequence[Outcome]) -> None:
        """Make a round's files the attempt's, and its costs too."""
        for outcome in outcomes:
            for entry in outcome.report.files:
                self._attempt.adopt(FileEntry.model_validate(entry))
            if outcome.fresh:
                self._attempt.charge(outcome.report.cpu_seconds)
        self._outcomes += outcomes

    def _resumptions(self) -> ResumptionCounts:
        counts = ResumptionCounts()
        for outcome in self._outcomes:
            told = outcome.report.resumptions
            counts.rollouts_resumed += told["rollouts_resumed"]
            counts.turns_resumed += told["turns_resumed"]
            counts.rollouts_restarted.update(told["rollouts_restarted"])
        return counts

    def _clean(self) -> None:
        """What workers left for one another has served."""
        location = self._stage.location
        try:
            for name in location.names():
                if name.startswith("journal-"):
                    location.delete(name)
            (location / WRITERS).delete_tree()
        except StoreError as error:  # the stage is complete all the same, and `roundhouse store gc` finds the rest
            log.warning("Parts that have served stay: %s", error)


class _Work:
    """The tasks of one round, each in a thread that waits for its worker."""

    def __init__(
        self,
        workers: Workers,
        restarts: int,
        before: int,
        planned: int,
        progress: Progress | None,
        outcome: Callable[[Shard, ShardTask], Outcome],
    ) -> None:
        self.lost = 0
        """Workers that were."""
        self._workers = workers
        self._restarts = restarts
        self._before = before
        self._planned = planned
        self._progress = progress
        self._outcome = outcome
        self._finished: dict[str, int] = {}
        self._told = 0
        self._stopped = threading.Event()

    def carry_out(self, tasks: Sequence[tuple[Shard, ShardTask]]) -> list[Outcome]:
        """The outcomes, in order; the first error ends the other workers, and what they had finished stays."""
        # not a `with`: it would wait for ever for a thread that hangs. The interpreter's end waits for them, though.
        pool = ThreadPoolExecutor(len(tasks), thread_name_prefix="shard")
        futures = [pool.submit(contextvars.copy_context().run, self._collect, shard, task) for shard, task in tasks]
        pool.shutdown(wait=False)
        try:
            while (left := wait(futures, LOOK_SECONDS, FIRST_EXCEPTION).not_done) and not _failed(futures):
                self._tell()
            if not left:
                self._tell()
                return [future.result() for future in futures]
        finally:
            self._stopped.set()
            self._until_ended(futures)
        raise _cause([error for future in futures if (error := _error(future)) is not None])

    def _collect(self, shard: Shard, task: ShardTask) -> Outcome:
        """Have one worker after another work on a shard, until it is whole or may not be tried again."""
        again = 0
        while True:
            try:
                with ACTIVITY.track("collect", "shard", task.label) as token:
                    self._workers.run(task, partial(self._heard, task.label, token), self._stopped)
                    outcome = self._outcome(shard, task)
                self._finished[task.label] = len(outcome.rollouts)  # what it said last may not have been heard
                return outcome
            except InfraError as error:
                if again >= self._restarts or self._stopped.is_set():
                    raise
                log.warning("%s was lost and is collected on: %s", task.label, error)
                self.lost += 1
            self._stopped.wait(FIRST_PAUSE_SECONDS * 2**again)
            again += 1

    def _heard(self, label: str, token: str, line: str) -> None:
        """A worker said something, in whatever thread."""
        ACTIVITY.advance(token)
        if (finished := finished_in(line)) is not None:
            self._finished[label] = finished
        else:
            log.info("%s: %s", label, line)

    def _tell(self) -> None:
        finished = sum(list(self._finished.values()))
        if self._progress is not None and finished != self._told:
            self._told = finished
            self._progress(self._before + finished, self._planned)

    def _until_ended(self, futures: Sequence[Future[Outcome]]) -> None:
        """Wait for the workers to end, so that no Job or process outlives the stage. To interrupt it again changes nothing."""
        deadline = time.monotonic() + self._workers.ending_seconds
        while time.monotonic() < deadline:
            try:
                if not wait(futures, LOOK_SECONDS).not_done:
                    return
            except Interrupted:
                continue
        log.error("%d workers have not ended in time.", sum(not future.done() for future in futures))


def _failed(futures: Sequence[Future[Outcome]]) -> bool:
    return any(_error(future) is not None for future in futures)


def _error(future: Future[Outcome]) -> BaseException | None:
    return future.exception() if future.done() else None


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """The one to raise: not of a worker that was told to end, and rather one that repeating cannot help."""
    return min(errors, key=lambda error: (isinstance(error, Stopped), isinstance(error, InfraError)))


def _read_report(place: Location) -> ShardReport | None:
    try:
        return ShardReport.model_validate_json(place.read(REPORT))
    except (NotFound, ValidationError):
        return None


def _digest(place: Location) -> str:
    """Of the report that lies there; empty without one."""
    try:
        return hashlib.sha256(place.read(REPORT)).hexdigest()
    except NotFound:
        return ""
