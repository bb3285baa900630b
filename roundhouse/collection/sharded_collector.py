"""Collection in shards: how several workers collect the rollouts of one policy version.

Invariant: when `collect` returns, each rollout that was asked for is in the store with its turns, and `commit` makes exactly
these the stage's datasets, once each. When `collect` returns or raises, no worker is left at work.

Each worker collects its shard of the plan as one process would all of it. A shard that has left its report is not collected
again, by this attempt or a later one, unless rollouts of it failed; one that was lost resumes with what it had written.

    plan ── split ──┬── s0001of0003  report there ─────────────────┐
                    ├── s0002of0003  worker ── lost ── worker ── report ── adopt files, add ledgers ── one manifest
                    └── s0003of0003  worker ── report ─────────────┘
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from roundhouse.activity import Interrupted
from roundhouse.collection.collector import Collected, Progress
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.collection.shards import Shard, shares, split
from roundhouse.config.models import Sampling
from roundhouse.errors import InfraError
from roundhouse.launch.base import Launcher, Program, Stopped
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage

log = logging.getLogger(__name__)


LOOK_SECONDS = 0.2
"""How often progress is reported, and an interruption noticed."""


class ShardedCollector:
    """As `collector.InProcessCollector`, by the workers of `rollout.distribution`."""

    def __init__(self, run: Run, stage: Stage, policy_version: int) -> None:
        self._run = run
        self._sharded = ShardedAttempt(run, stage, policy_version)
        self._rounds = 0
        self.metrics, self.commit, self.whole = self._sharded.metrics, self._sharded.commit, self._sharded.whole

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
            with sharded.open_launcher([task for _, task in missing]) as launcher:
                work = _Round(sharded, launcher, kept, len(specs), progress)
                found |= {outcome.label: outcome for outcome in work.carry_out(missing)}
            sharded.spend(launcher.metrics())
        outcomes = [found[shard.label] for shard in shards]
        sharded.take(outcomes)
        seconds = max((outcome.report.seconds for outcome in outcomes if outcome.fresh), default=0.0)
        return Collected([rollout for outcome in outcomes for rollout in outcome.rollouts], seconds)


class _Round:
    """The tasks of one round, each in a thread that waits for its worker."""

    def __init__(
        self, sharded: ShardedAttempt, launcher: Launcher, before: int, planned: int, progress: Progress | None
    ) -> None:
        self._sharded = sharded
        self._launcher = launcher
        self._before = before
        self._planned = planned
        self._progress = progress
        self._finished: dict[str, int] = {}
        self._reported = 0
        self._stopped = threading.Event()

    def carry_out(self, tasks: Sequence[tuple[Shard, Program]]) -> list[ShardOutcome]:
        """The outcomes, in order; the first error ends the other workers, and what they had finished stays."""
        # not a `with`: it would wait for ever for a thread that hangs. The interpreter's end waits for them, though.
        pool = ThreadPoolExecutor(len(tasks), thread_name_prefix="shard")
        futures = [pool.submit(contextvars.copy_context().run, self._collect, shard, task) for shard, task in tasks]
        pool.shutdown(wait=False)
        try:
            while (left := wait(futures, LOOK_SECONDS, FIRST_EXCEPTION).not_done) and not any(map(_error, futures)):
                self._report_progress()
            if not left:
                self._report_progress()
                return [future.result() for future in futures]
        finally:
            self._stopped.set()
            self._until_ended(futures)
        errors = [error for future in futures if (error := _error(future)) is not None]
        # Not that of a worker that was ended, and rather one that repeating cannot help.
        raise min(errors, key=lambda error: (isinstance(error, Stopped), isinstance(error, InfraError)))

    def _collect(self, shard: Shard, task: Program) -> ShardOutcome:
        """Have one worker after another work on a shard, until it is whole or may not be tried again."""
        while True:
            try:
                outcome = self._sharded.work(self._launcher, shard, task, self._stopped, self._finished)
                self._finished[shard.label] = len(outcome.rollouts)  # what it said last may not have been heard
                return outcome
            except InfraError as error:
                if not self._sharded.may_repeat(task, error, self._stopped):
                    raise

    def _report_progress(self) -> None:
        finished = sum(list(self._finished.values()))
        if self._progress is not None and finished != self._reported:
            self._reported = finished
            self._progress(self._before + finished, self._planned)

    def _until_ended(self, futures: Sequence[Future[ShardOutcome]]) -> None:
        """Wait for the workers to end, so that no Job or process outlives the stage. To interrupt it again changes nothing."""
        deadline = time.monotonic() + self._launcher.ending_seconds
        while time.monotonic() < deadline:
            try:
                if not wait(futures, LOOK_SECONDS).not_done:
                    return
            except Interrupted:
                continue
        log.error("%d workers have not ended in time.", sum(not future.done() for future in futures))


def _error(future: Future[ShardOutcome]) -> BaseException | None:
    return future.exception() if future.done() else None
