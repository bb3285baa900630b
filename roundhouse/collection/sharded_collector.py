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
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial

from roundhouse.activity import ACTIVITY
from roundhouse.collection.collector import Collected, InProcessCollector, Progress, RolloutCollector
from roundhouse.collection.parts import Parts
from roundhouse.collection.shard_worker import finished_in
from roundhouse.collection.shard_workers import ShardTask, Workers, workers_of
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.collection.shards import Shard, shares, split
from roundhouse.config.distribution import InProcessCollection
from roundhouse.config.models import Sampling
from roundhouse.errors import InfraError
from roundhouse.health.watchdog import Interrupted
from roundhouse.launch.child_process import Stopped
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often progress is told, and an interruption noticed."""
FIRST_PAUSE_SECONDS = 1.0
"""Before a lost worker is started again; twice as long each time after."""


class ShardedCollector:
    """A `Collection` by the workers of `rollout.distribution`."""

    def __init__(self, run: Run, stage: Stage, policy_version: int) -> None:
        self._run = run
        self._sharded = ShardedAttempt(run, stage, policy_version)
        self._rounds = 0
        self.metrics, self.commit = self._sharded.metrics, self._sharded.commit

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
        sharded = self._sharded
        shards = split(specs, sharded.distribution.shards)
        concurrency = self._run.config.rollout.concurrency
        limits = [None] * len(shards) if concurrency is None else shares(concurrency, len(shards))
        tasks = [
            sharded.task(shard, sampling, engine_url, limit, on_policy=on_policy, round_number=self._rounds)
            for shard, limit in zip(shards, limits, strict=True)
        ]
        before = [sharded.left_before(shard, task) for shard, task in zip(shards, tasks, strict=True)]
        found = {outcome.label: outcome for outcome in before if outcome is not None}
        missing = [(shard, task) for shard, task in zip(shards, tasks, strict=True) if shard.label not in found]
        if missing:
            kept = sum(len(outcome.rollouts) for outcome in found.values())
            with workers_of(self._run, [task for _, task in missing]) as workers:
                work = _Work(workers, sharded.distribution.restarts, kept, len(specs), progress, sharded.outcome)
                found |= {outcome.label: outcome for outcome in work.carry_out(missing)}
                sharded.lost += work.lost
                sharded.spend(workers.metrics())
        outcomes = [found[shard.label] for shard in shards]
        sharded.take(outcomes)
        seconds = max((outcome.report.seconds for outcome in outcomes if outcome.fresh), default=0.0)
        return Collected([rollout for outcome in outcomes for rollout in outcome.rollouts], seconds)


class _Work:
    """The tasks of one round, each in a thread that waits for its worker."""

    def __init__(
        self,
        workers: Workers,
        restarts: int,
        before: int,
        planned: int,
        progress: Progress | None,
        outcome: Callable[[Shard, ShardTask], ShardOutcome],
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

    def carry_out(self, tasks: Sequence[tuple[Shard, ShardTask]]) -> list[ShardOutcome]:
        """The outcomes, in order; the first error ends the other workers, and what they had finished stays."""
        # not a `with`: it would wait for ever for a thread that hangs. The interpreter's end waits for them, though.
        pool = ThreadPoolExecutor(len(tasks), thread_name_prefix="shard")
        futures = [pool.submit(contextvars.copy_context().run, self._collect, shard, task) for shard, task in tasks]
        pool.shutdown(wait=False)
        try:
            while (left := wait(futures, LOOK_SECONDS, FIRST_EXCEPTION).not_done) and not any(map(_error, futures)):
                self._tell()
            if not left:
                self._tell()
                return [future.result() for future in futures]
        finally:
            self._stopped.set()
            self._until_ended(futures)
        errors = [error for future in futures if (error := _error(future)) is not None]
        # Not that of a worker that was told to end, and rather one that repeating cannot help.
        raise min(errors, key=lambda error: (isinstance(error, Stopped), isinstance(error, InfraError)))

    def _collect(self, shard: Shard, task: ShardTask) -> ShardOutcome:
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

    def _until_ended(self, futures: Sequence[Future[ShardOutcome]]) -> None:
        """Wait for the workers to end, so that no Job or process outlives the stage. To interrupt it again changes nothing."""
        deadline = time.monotonic() + self._workers.ending_seconds
        while time.monotonic() < deadline:
            try:
                if not wait(futures, LOOK_SECONDS).not_done:
                    return
            except Interrupted:
                continue
        log.error("%d workers have not ended in time.", sum(not future.done() for future in futures))


def _error(future: Future[ShardOutcome]) -> BaseException | None:
    return future.exception() if future.done() else None


def open_collector(run: Run, stage: Stage, policy_version: int) -> RolloutCollector:
    """A new attempt at a stage, by the collector that `rollout.distribution` names."""
    if isinstance(run.config.rollout.distribution, InProcessCollection):
        return InProcessCollector(run.config, Parts(run.begin(stage, policy_version=policy_version), policy_version))
    return ShardedCollector(run, stage, policy_version)
