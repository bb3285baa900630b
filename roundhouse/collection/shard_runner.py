"""The runner over shards (`rollout.distribution`): what the controller admits one by one, a worker is given at once.

Invariants: a shard is whole groups of one iteration, next to each other in the plan, so that the controller admits what is
missing of it in one go, on one version; it begins when its iteration's collection is open, and no more than
`rollout.distribution.shards` are at work at once, whatever iterations they are of. What a worker made is in the store before
the controller hears that it finished; when a worker has ended, none of its rollouts runs: each has its outcome, or is to begin
again, on whatever version the engine holds then. When the runner has ended, no worker is left at work.

    open(1) ── s1 s2 s3 ──┐                        ┌── worker ── report ──> outcomes of s3 of collect 1
    open(2) ── s1 s2 s3 ──┼── admission ── places ─┼── worker ── lost ──> its rollouts begin again, what it wrote is kept
                          │   (oldest first)       └── …
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import islice

from roundhouse.activity import ACTIVITY
from roundhouse.collection import events as happened
from roundhouse.collection import parts as stage_parts
from roundhouse.collection.dispatch import ENGINE, Dispatch
from roundhouse.collection.events import Continue
from roundhouse.collection.parts import by_id
from roundhouse.collection.plan import Plan, generated_in
from roundhouse.collection.resumption import forget
from roundhouse.collection.rollouts import Key
from roundhouse.collection.runner import END_SECONDS, LOOK_SECONDS, Progress, RolloutRunner, window_of
from roundhouse.collection.running_shard import OpenShard, OpenShards, RunningShard
from roundhouse.collection.shard_workers import workers_of
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.collection.shards import split
from roundhouse.config.distribution import Shards
from roundhouse.errors import InfraError
from roundhouse.health.watchdog import Interrupted
from roundhouse.store.cpu_accounting import attribute_to_this_stage
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage
from roundhouse.trajectories.records import Rollout

log = logging.getLogger(__name__)


class ShardRunner(RolloutRunner[OpenShards]):
    """See the module's docstring."""

    def __init__(self, run: Run, plan: Plan, dispatch: Dispatch, engine_url: str) -> None:
        distribution = run.config.rollout.distribution
        assert isinstance(distribution, Shards), "a collection in this process has no shards"
        super().__init__(run, plan, dispatch, engine_url)
        self._distribution = distribution
        self._at_work: set[RunningShard] = set()
        self._ending_seconds = 0.0
        """How long workers take to end."""

    # From the stage's thread

    def open(self, iteration: int, stage: Stage, oldest_version: int, progress: Progress | None = None) -> OpenShards:
        if self.ended.is_set():
            raise self.error or InfraError("The rollout runner has ended.")
        attempt = ShardedAttempt(self.run, stage, iteration - 1, oldest_version)
        shards = self._shards(iteration, attempt)
        with self._dispatch as dispatch:
            controller = dispatch.controller
            settled = {position for position in self.plan.groups(iteration) if controller.has_decided(position)}
            counted = {key for key in self.plan.keys(iteration) if key[0] in settled or key in controller.rollouts}
        there = [each for each in shards if counted.issuperset(each.keys)]
        outcomes = self._whole(iteration, attempt, there, settled)
        missing = [each for each in shards if each.label not in outcomes]
        kept = {key for each in shards for key in each.keys if key in counted}
        kept -= {
            key for each in missing if counted.issuperset(each.keys) for key in each.keys
        }  # lost since it was told
        with ExitStack() as stack:
            tasks = [each.task for each in missing]
            workers = stack.enter_context(workers_of(self.run, tasks)) if tasks else None
            context = contextvars.copy_context()
            opened = OpenShards(iteration, attempt, shards, outcomes, workers, stack.pop_all(), context, progress)
        self._ending_seconds = max(self._ending_seconds, 0.0 if workers is None else workers.ending_seconds)
        with self._dispatch as dispatch:
            forget(dispatch.controller, dispatch, self.plan, iteration, kept)
            self._open[iteration] = opened
            self.wanted = None
            dispatch.wake()
        return opened

    def close(self, iteration: int) -> None:
        """Let no further shard of an iteration begin, and end its workers; what they have not finished is to begin again."""
        with self._dispatch as dispatch:
            opened = self._open.pop(iteration, None)
            if opened is None:
                return
            opened.stopped.set()
            dispatch.wake()
        self._until_ended(opened)
        if opened.workers is not None:
            opened.attempt.spend(opened.workers.metrics())
        opened.ending.close()

    def at_hand(self, positions: Iterable[int]) -> dict[int, list[Rollout]]:
        """Nothing: workers keep the rollouts in the store."""
        return {}

    def outlines(self, positions: Collection[int]) -> list[Rollout]:
        return [
            rollout
            for opened in self._open.values()
            for outcome in opened.outcomes.values()
            for key, rollout in self.plan.keyed(opened.iteration, outcome.rollouts).items()
            if key[0] in positions
        ]

    def window_seconds(self, positions: Collection[int]) -> float:
        return window_of(
            [
                opened.spans[each.label]
                for opened in self._open.values()
                for each in opened.shards
                if each.label in opened.spans and any(key[0] in positions for key in each.keys)
            ]
        )

    def flush(self) -> None:
        """Write down the controller's events; what they tell is in the store."""
        self._dispatch.record()

    def _shards(self, iteration: int, attempt: ShardedAttempt) -> list[OpenShard]:
        """Each with its share of `rollout.concurrency`, which is the same for all: any of them may be at work at once."""
        config, count = self.run.config, self._distribution.shards
        share = None if config.rollout.concurrency is None else max(1, config.rollout.concurrency // count)
        keys = self.plan.keys(iteration)
        return [
            OpenShard(
                shard,
                attempt.task(shard, config.generation.sampling, self.url, share),
                tuple(islice(keys, len(shard.specs))),
            )
            for shard in split(self.plan.specs(iteration), count)
        ]

    def _end_seconds(self) -> float:
        return END_SECONDS + self._ending_seconds

    def _is_at_work(self, opened: OpenShards) -> bool:
        return bool(self._of(opened))

    def _refuse_failed(self, opened: OpenShards) -> None:
        if opened.error is not None:
            raise opened.error

    def _report_progress(self, opened: OpenShards) -> None:
        opened.report_progress()

    def _whole(
        self, iteration: int, attempt: ShardedAttempt, shards: list[OpenShard], settled: Collection[int]
    ) -> dict[str, ShardOutcome]:
        """Shards that need no worker: their rollouts are in the store, or, where steps were decided on for all of the shard's
        groups (`settled`), whatever of them is."""
        found: dict[str, ShardOutcome] = {}
        written: dict[str, Rollout] | None = None
        for each in shards:
            is_settled = all(position in settled for position, _ in each.keys)
            outcome = attempt.left_before(each.shard, each.task, is_settled)
            if outcome is None:
                written = written or by_id(generated_in(self.run, iteration))
                outcome = attempt.taken_over(each.shard, written, is_settled)
            if outcome is not None:
                found[each.label] = outcome
        return found

    def _of(self, opened: OpenShards | None) -> list[RunningShard]:
        return [work for work in self._at_work if opened is None or work.opened is opened]

    def _until_ended(self, opened: OpenShards | None) -> None:
        """Wait for the workers of one collection, or of all, to end. To interrupt it again changes nothing."""
        deadline = time.monotonic() + self._ending_seconds
        while True:
            try:
                with self._dispatch as dispatch:
                    if not (left := self._of(opened)):
                        return
                    if time.monotonic() > deadline:
                        break
                    dispatch.wait(LOOK_SECONDS)
                ACTIVITY.advance()
            except Interrupted:
                continue
        for work in left:
            log.error("The worker of %s, iteration %d, has not ended in time.", work.shard.label, work.opened.iteration)
            work.evict("its worker does not end")

    # In the runner's thread

    def _run(self) -> None:
        try:
            with attribute_to_this_stage():
                self._admit()
        except BaseException as error:  # noqa: BLE001 - raised again in the generation loop
            self.error = error
        try:
            for opened in list(self._open.values()):
                opened.stopped.set()
            self._until_ended(None)
            self._dispatch.record()
        except BaseException as error:  # noqa: BLE001
            self.error = self.error or error
        finally:
            self.ended.set()
            self._dispatch.wake()

    def _admit(self) -> None:
        recorded = time.monotonic()
        while not self._stopped.is_set():
            with self._dispatch as dispatch:
                if (begun := self._begin()) is None:
                    dispatch.wait(LOOK_SECONDS)
                self._cpu_seconds = time.thread_time()
            if begun is not None:
                collect = partial(begun.opened.context.copy().run, begun.collect, self._at_work)
                name = f"shard {begun.shard.label} of iteration {begun.opened.iteration}"
                threading.Thread(target=collect, name=name, daemon=True).start()
            if time.monotonic() - recorded >= stage_parts.FLUSH_SECONDS:
                self._dispatch.record()
                recorded = time.monotonic()

    def _begin(self) -> RunningShard | None:
        """The next shard, with all of its rollouts that the controller admits; None while none may begin."""
        controller = self._dispatch.controller
        if len(self._at_work) >= self._distribution.shards:
            return None
        given = controller.admission(ENGINE)
        if not isinstance(given, Continue):
            return None
        iteration, version = self.plan.iteration_of(given.position), given.version
        opened = self._opened_for(iteration)
        if opened is None or opened.error is not None:  # of the latter, its stage is about to close it
            return None
        shard = opened.of((given.position, given.sample))
        attempts: dict[Key, int] = {}
        while isinstance(given, Continue) and shard.holds(key := (given.position, given.sample)):
            attempts[key] = given.attempt
            self._dispatch.tell(happened.RolloutStarted(*key, given.attempt, ENGINE))
            given = controller.admission(ENGINE)
        work = RunningShard(opened, shard, version, attempts, self._dispatch, self._distribution.restarts)
        self._at_work.add(work)
        return work
