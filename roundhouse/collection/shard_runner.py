"""Runner over shards (`rollout.distribution`): a worker gets all rollouts of a shard at once.

Invariants: a shard is adjacent whole groups of one iteration, so the controller admits its missing rollouts together,
on one version. It starts when its iteration is open; at most `rollout.distribution.shards` run at once over all
iterations. A worker's rollouts are stored before the controller learns that they finished. When a worker has ended,
each of its rollouts has an outcome or is scheduled again, on the engine's version at that time. When the runner has
ended, no worker is running.

    open(1) ── s1 s2 s3 ──┐                        ┌── worker ── report ──> outcomes of s3 of collect 1
    open(2) ── s1 s2 s3 ──┼── admission ── places ─┼── worker ── lost ──> its rollouts begin again, stored ones are kept
                          │   (oldest first)       └── …
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from roundhouse.activity import ACTIVITY, Interrupted
from roundhouse.collection import collector
from roundhouse.collection import controller as happened
from roundhouse.collection.collector import by_id
from roundhouse.collection.controller import Block, Continue
from roundhouse.collection.pool import Key
from roundhouse.collection.runner import (
    ENGINE,
    LOOK_SECONDS,
    Dispatch,
    Progress,
    RolloutRunner,
    finished_rollouts,
    forget,
    window_of,
)
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.collection.shards import Shard, begun_on, shares, split
from roundhouse.cpu import attribute_to_this_stage
from roundhouse.errors import InfraError
from roundhouse.launch.base import Launcher, Program, Stopped
from roundhouse.trajectories.records import Rollout, Status

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenShard:
    """A shard of an open collection."""

    shard: Shard
    task: Program
    keys: tuple[Key, ...]
    """Keys of its rollouts, in plan order."""

    @property
    def label(self) -> str:
        return self.shard.label

    @property
    def place(self) -> Key:
        """Its first rollout, by which it is known among the shards of all rounds."""
        return self.keys[0]

    def holds(self, key: Key) -> bool:
        """Return whether a rollout of its iteration belongs to it; its rollouts are adjacent."""
        return self.keys[0] <= key <= self.keys[-1]


@dataclass
class OpenShards:
    """An open iteration: its shards may start."""

    iteration: int
    attempt: ShardedAttempt
    context: contextvars.Context
    """Context of the stage, so that its workers count as the stage's progress."""
    progress: Progress | None
    shards: list[OpenShard] = field(default_factory=list)
    """Shards of all started rounds, in plan order."""
    outcomes: dict[Key, ShardOutcome] = field(default_factory=dict)
    """By the place of the shard; complete when all have one."""
    launcher: Launcher | None = None
    """None: all shards of the newest round were whole when it was opened."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Its workers are to end."""
    error: Exception | None = None
    """Why it cannot be completed by this attempt."""
    finished: dict[str, int] = field(default_factory=dict)
    """Finished rollouts by shard, as the worker at work reports them."""
    reported: int = 0
    spans: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """By the place of the shard, the first begin and the last end of its workers in this attempt, of one clock."""

    @property
    def complete(self) -> bool:
        return len(self.outcomes) == len(self.shards)

    @property
    def planned(self) -> int:
        return sum(len(open_shard.keys) for open_shard in self.shards)

    @property
    def window_seconds(self) -> float:
        return window_of(self.spans.values())

    def of(self, key: Key) -> OpenShard:
        """The shard that a rollout is in."""
        return next(open_shard for open_shard in self.shards if open_shard.holds(key))

    def made(self) -> list[Rollout]:
        outcomes = [self.outcomes[each.place] for each in self.shards if each.place in self.outcomes]
        return [rollout for outcome in outcomes for rollout in outcome.rollouts]

    def missing(self) -> list[OpenShard]:
        """Shards without an outcome."""
        return [each for each in self.shards if each.place not in self.outcomes]

    def launch(self, missing: Sequence[OpenShard]) -> None:
        """Release the workers of earlier rounds and open the launcher for these shards."""
        self.let_go()
        if missing:
            self.launcher = self.attempt.open_launcher([each.task for each in missing])

    def let_go(self) -> None:
        """Release the ended workers and count their cost."""
        if (launcher := self.launcher) is not None:
            self.launcher = None
            launcher.close()
            self.attempt.spend(launcher.metrics())

    def settle(self) -> list[Rollout]:
        """A shard without an outcome has groups that were dropped before it was whole: what there is of it counts."""
        written: dict[str, Rollout] | None = None
        settled = []
        for each in self.shards:
            if (outcome := self.outcomes.get(each.place)) is None:
                written = written or by_id(self.attempt.stage)
                outcome = self.attempt.taken_over(each.shard, written, is_settled=True)
            if outcome is not None:
                settled.append(outcome)
        self.attempt.take(settled)
        return [rollout for outcome in settled for rollout in outcome.rollouts]

    def report_progress(self) -> None:
        """Report the progress if it changed."""
        counted = {each.label for each in self.shards if each.place not in self.outcomes}
        at_work = sum(count for label, count in list(self.finished.items()) if label in counted)
        finished = at_work + sum(len(outcome.rollouts) for outcome in list(self.outcomes.values()))
        if self.progress is not None and finished != self.reported:
            self.reported = finished
            self.progress(finished, self.planned)


@dataclass(eq=False)
class RunningShard:
    """The worker of a shard that runs, with the rollouts that the controller counts as its own."""

    opened: OpenShards
    shard: OpenShard
    version: int
    """On which they were admitted."""
    attempts: Mapping[Key, int]
    dispatch: Dispatch

    def collect(self, at_work: set[RunningShard]) -> None:
        """Have the shard collected, in the calling thread; it leaves the set last of all."""
        opened = self.opened
        with attribute_to_this_stage():
            began_cpu = time.thread_time()
            try:
                if self._is_held():
                    self._take(self._carry_out())
            except InfraError as error:  # its rollouts begin again after a while
                if (
                    not opened.attempt.may_repeat(self.shard.task, error, opened.stopped)
                    and not opened.stopped.is_set()
                ):
                    opened.error = opened.error or error
            except Stopped:
                pass
            except Exception as error:  # noqa: BLE001 - the stage raises it
                opened.error = error  # rather than one of a lost worker: to repeat cannot help
            finally:
                with self.dispatch as dispatch:
                    self.evict("its stage was cancelled" if opened.stopped.is_set() else "its worker was lost")
                    opened.finished.pop(self.shard.label, None)
                    opened.attempt.charge(time.thread_time() - began_cpu)
                    at_work.discard(self)
                    dispatch.wake()

    def evict(self, reason: str) -> None:
        """Schedule its running rollouts again."""
        with self.dispatch as dispatch:
            running = [key for key, attempt in self.attempts.items() if dispatch.is_running(key, attempt)]
            dispatch.tell(*(happened.RolloutEvicted(*key, reason) for key in running))

    def _is_held(self) -> bool:
        """Wait for the weights that the shard starts on, if it was admitted during their transfer. Return False if the
        shard is not wanted any more."""
        with self.dispatch as dispatch:
            while not self.opened.stopped.is_set():
                version = dispatch.controller.replicas[ENGINE].version
                if version is not None and version >= self.version:
                    return True
                ACTIVITY.advance()
                dispatch.wait(LOOK_SECONDS)
        return False

    def _carry_out(self) -> ShardOutcome:
        opened, shard = self.opened, self.shard
        assert opened.launcher is not None, "a shard that has begun was missing when its collection was opened"
        began, _ = opened.spans.get(shard.place, (time.monotonic(), 0.0))
        try:
            task = begun_on(shard.task, self.version)
            return opened.attempt.work(opened.launcher, shard.shard, task, opened.stopped, opened.finished)
        finally:
            opened.spans[shard.place] = began, time.monotonic()

    def _take(self, outcome: ShardOutcome) -> None:
        """The shard is whole: report the outcome of each rollout."""
        with self.dispatch as dispatch:
            events: list[happened.Event] = []
            for key, rollout in zip(self.shard.keys, outcome.rollouts, strict=True):
                attempt = self.attempts.get(key)
                if attempt is None or not dispatch.is_running(key, attempt):
                    continue
                if rollout.status is Status.FAILED:
                    reason = rollout.failure_code or "failed"
                    events.append(happened.RolloutFailed(*key, attempt, reason, final=True))
                else:
                    events.append(happened.RolloutFinished(*key, attempt))
            dispatch.tell(*events)
            self.opened.outcomes[self.shard.place] = outcome


class ShardRunner(RolloutRunner[OpenShards, ShardedAttempt]):
    """See the module's docstring."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        distribution = self.config.rollout.distribution.workers
        assert distribution is not None, "a collection in this process has no shards"
        self._distribution = distribution
        self._at_work: set[RunningShard] = set()

    # From the stage's thread

    def open(self, iteration: int, attempt: ShardedAttempt, progress: Progress | None = None) -> OpenShards:
        self._refuse_ended()
        opened = OpenShards(iteration, attempt, contextvars.copy_context(), progress)
        pool, number = self._dispatch.controller.pool, 0
        while number < pool.rounds_of(iteration):  # fewer when a round turns out to have lost a shard
            number += 1
            self._enter(opened, number)
        self._launch(opened, opened.missing())
        return self._register(opened)

    def _begin_round(self, opened: OpenShards, number: int) -> None:
        self._until_ended(opened)  # threads of the previous round; its workers have ended
        shards, iteration = self._shards(opened, number), opened.iteration
        outcomes = self._whole(opened, shards, ())
        written = self.plan.keyed(iteration, by_id(opened.attempt.stage).values())
        earlier = {key: written[key] for key in self.plan.keys(iteration, number) if key in written}
        self._launch(opened, [each for each in shards if each.place not in outcomes])
        with self._dispatch as dispatch:
            opened.shards += shards
            opened.outcomes |= outcomes
            dispatch.tell(happened.RoundStarted(iteration, number, tuple(finished_rollouts(earlier, iteration - 1))))

    def _enter(self, opened: OpenShards, number: int) -> None:
        """Add the shards of a started round. Schedule rollouts again that were lost since they were recorded."""
        shards, iteration = self._shards(opened, number), opened.iteration
        with self._dispatch as dispatch:
            controller = dispatch.controller
            settled = {position for position in self.plan.groups(iteration, number) if controller.has_decided(position)}
            counted = {key for key in self.plan.keys(iteration, number) if key[0] in settled or key in controller.pool}
        present = [each for each in shards if counted.issuperset(each.keys)]
        opened.outcomes |= self._whole(opened, present, settled)
        opened.shards += shards
        lost = {key for each in present if each.place not in opened.outcomes for key in each.keys}
        forget(self._dispatch, self.plan.keys(iteration, number), counted - lost)

    def _shards(self, opened: OpenShards, number: int) -> list[OpenShard]:
        """Return the shards of a round."""
        concurrency, count = self.config.rollout.concurrency, self._distribution.shards
        shards = split(self.plan.specs(opened.iteration, number), count)
        limits: list[int | None] = [None] * len(shards)
        if concurrency is not None:  # shards of several iterations may run at once in any combination
            is_alone = self.plan.bound.start_lag == 0
            limits = [*shares(concurrency, len(shards))] if is_alone else [max(1, concurrency // count)] * len(shards)
        keys = self.plan.keys(opened.iteration, number)
        opened.attempt.rounds += 1
        return [
            OpenShard(
                shard,
                opened.attempt.task(shard, self.sampling, self.url, limit, on_policy=self.on_policy),
                tuple(islice(keys, len(shard.specs))),
            )
            for shard, limit in zip(shards, limits, strict=True)
        ]

    def _launch(self, opened: OpenShards, missing: Sequence[OpenShard]) -> None:
        opened.launch(missing)
        if opened.launcher is not None:
            self._ending_seconds = max(self._ending_seconds, opened.launcher.ending_seconds)

    def close(self, iteration: int) -> None:
        """Start no further shard of an iteration and end its workers. Unfinished rollouts are scheduled again."""
        with self._dispatch as dispatch:
            opened = self._open.pop(iteration, None)
            if opened is None:
                return
            opened.stopped.set()
            dispatch.wake()
        self._until_ended(opened)
        opened.let_go()

    def at_hand(self, positions: Iterable[int]) -> dict[int, list[Rollout]]:
        """Nothing: workers keep the rollouts in the store."""
        return {}

    def window_seconds(self, positions: Collection[int]) -> float:
        return window_of(
            [
                opened.spans[each.place]
                for opened in self._open.values()
                for each in opened.shards
                if each.place in opened.spans and any(key[0] in positions for key in each.keys)
            ]
        )

    def flush(self) -> None:
        """Write the controller's events; their results are stored."""
        self._dispatch.record()

    def _is_at_work(self, opened: OpenShards) -> bool:
        return bool(self._of(opened))

    def _refuse_failed(self, opened: OpenShards) -> None:
        if opened.error is not None:
            raise opened.error

    def _report_progress(self, opened: OpenShards) -> None:
        opened.report_progress()

    def _whole(
        self, opened: OpenShards, shards: Sequence[OpenShard], settled: Collection[int]
    ) -> dict[Key, ShardOutcome]:
        """Return shards that need no worker: all rollouts are stored, or all groups were chosen for steps (`settled`),
        in which case the stored rollouts suffice."""
        outcomes: dict[Key, ShardOutcome] = {}
        written: dict[str, Rollout] | None = None
        for each in shards:
            is_settled = all(position in settled for position, _ in each.keys)
            outcome = opened.attempt.left_before(each.shard, each.task, is_settled)
            if outcome is None and self._dispatch.is_journalled:  # otherwise a worker reads the stored rollouts
                written = written or by_id(opened.attempt.stage)
                outcome = opened.attempt.taken_over(each.shard, written, is_settled)
            if outcome is not None:
                outcomes[each.place] = outcome
        return outcomes

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
            recorded = time.monotonic()
            while not self._stopped.is_set():
                with self._dispatch as dispatch:
                    if (admitted := self._begin()) is None:
                        dispatch.wait(LOOK_SECONDS)
                    self._count_cpu()
                if admitted is not None:
                    collect = partial(admitted.opened.context.copy().run, admitted.collect, self._at_work)
                    name = f"shard {admitted.shard.label} of iteration {admitted.opened.iteration}"
                    threading.Thread(target=collect, name=name, daemon=True).start()
                if time.monotonic() - recorded >= collector.FLUSH_SECONDS:
                    self._dispatch.record()
                    recorded = time.monotonic()
        except BaseException as error:  # noqa: BLE001 - raised again in the generation loop
            self.error = error
        try:
            for opened in list(self._open.values()):
                opened.stopped.set()
            self._until_ended(None)
            self._dispatch.record()
        except BaseException as error:  # noqa: BLE001 - raised again in the generation loop, unless another came before
            self.error = self.error or error
        finally:
            self.ended.set()
            self._dispatch.wake()

    def _begin(self) -> RunningShard | None:
        """The next shard, with all of its rollouts that the controller admits; None while none may begin."""
        controller = self._dispatch.controller
        if len(self._at_work) >= self._distribution.shards:
            return None
        if (admitted := self._admitted()) is None or admitted[
            1
        ].error is not None:  # of the latter, its stage is about to close it
            return None
        first, opened = admitted
        version, shard = first.version, opened.of((first.position, first.sample))
        attempts: dict[Key, int] = {}
        admission: Continue | Block = first
        while isinstance(admission, Continue) and shard.holds(key := (admission.position, admission.sample)):
            attempts[key] = admission.attempt
            self._dispatch.tell(happened.RolloutStarted(*key, admission.attempt, ENGINE))
            admission = controller.admission(ENGINE)
        work = RunningShard(opened, shard, version, attempts, self._dispatch)
        self._at_work.add(work)
        return work
