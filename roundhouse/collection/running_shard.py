"""The shards of an open iteration, and the worker of one that runs, with the rollouts that the controller counts as its own.

Invariants: a shard is whole (it has an outcome), runs, or waits for admission; what a worker made is in the store before the
controller hears of it; when it has ended, none of its rollouts runs: each has its outcome, or is to begin again.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roundhouse.activity import ACTIVITY
from roundhouse.collection import events as happened
from roundhouse.collection.dispatch import ENGINE, Dispatch
from roundhouse.collection.parts import by_id
from roundhouse.collection.rollouts import Key
from roundhouse.collection.runner import LOOK_SECONDS, Progress, window_of
from roundhouse.collection.shard_worker import finished_in
from roundhouse.collection.shard_workers import ShardTask, Workers
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.collection.sharded_collector import FIRST_PAUSE_SECONDS
from roundhouse.collection.shards import Shard
from roundhouse.errors import InfraError
from roundhouse.launch.child_process import Stopped
from roundhouse.store.cpu_accounting import attribute_to_this_stage
from roundhouse.store.manifest import Reference
from roundhouse.trajectories.records import Rollout, Status


@dataclass(frozen=True)
class OpenShard:
    """A shard of an open collection."""

    shard: Shard
    task: ShardTask
    keys: tuple[Key, ...]
    """Of its rollouts, in the plan's order."""

    @property
    def label(self) -> str:
        return self.shard.label

    def holds(self, key: Key) -> bool:
        """Whether a rollout of its iteration is in it: they lie next to each other."""
        return self.keys[0] <= key <= self.keys[-1]


@dataclass
class OpenShards:
    """An iteration whose shards may begin."""

    iteration: int
    attempt: ShardedAttempt
    shards: list[OpenShard]
    outcomes: dict[str, ShardOutcome]
    """By shard; complete when all have one."""
    workers: Workers | None
    """None: all shards were whole when it was opened."""
    ending: ExitStack
    """Lets go of the workers."""
    context: contextvars.Context
    """Of its stage, so that its workers are signs of life of this stage."""
    progress: Progress | None
    stopped: threading.Event = field(default_factory=threading.Event)
    """Its workers are to end."""
    error: Exception | None = None
    """Why it cannot be completed by this attempt."""
    losses: Counter[str] = field(default_factory=Counter)
    finished: dict[str, int] = field(default_factory=dict)
    """Rollouts that a worker at work has told to be finished, by shard."""
    told: int = 0
    cpu_seconds: float = 0.0
    """Of the threads that waited for its workers."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By shard, the first begin and the last end of its workers in this attempt, of one clock."""

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
        return [rollout for outcome in self.outcomes.values() for rollout in outcome.rollouts]

    def settle(self) -> list[Rollout]:
        """A shard without an outcome has groups that were dropped before it was whole: what there is of it counts."""
        written: dict[str, Rollout] | None = None
        settled = []
        for each in self.shards:
            if (outcome := self.outcomes.get(each.label)) is None:
                written = written or by_id(self.attempt.stage)
                outcome = self.attempt.taken_over(each.shard, written, is_settled=True)
            if outcome is not None:
                settled.append(outcome)
        self.attempt.take(settled)
        return [rollout for outcome in settled for rollout in outcome.rollouts]

    def charge(self, cpu_seconds: float) -> None:
        self.attempt.charge(self.cpu_seconds + cpu_seconds)

    def metrics(self) -> dict[str, float]:
        return self.attempt.metrics()

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        return self.attempt.commit(inputs=inputs, counts=counts, metrics=metrics, details=details)

    def report_progress(self) -> None:
        """Report how far it is, where that is news."""
        at_work = sum(count for label, count in list(self.finished.items()) if label not in self.outcomes)
        finished = at_work + sum(len(outcome.rollouts) for outcome in list(self.outcomes.values()))
        if self.progress is not None and finished != self.told:
            self.told = finished
            self.progress(finished, self.planned)


log = logging.getLogger(__name__)


@dataclass(eq=False)
class RunningShard:
    """See the module's docstring."""

    opened: OpenShards
    shard: OpenShard
    version: int
    """On which they were admitted."""
    attempts: Mapping[Key, int]
    dispatch: Dispatch
    restarts: int
    """How many workers its shard may lose."""

    def collect(self, at_work: set[RunningShard]) -> None:
        """Have the shard collected, in the calling thread; it leaves the set last of all."""
        opened, label = self.opened, self.shard.label
        with attribute_to_this_stage():
            began_cpu = time.thread_time()
            try:
                if self._is_held():
                    with ACTIVITY.track("collect", "shard", label) as token:
                        self._take(self._carry_out(token))
            except InfraError as error:
                self._lost(error)
            except Stopped:
                pass
            except Exception as error:  # noqa: BLE001 - the stage raises it
                opened.error = error
            finally:
                with self.dispatch as dispatch:
                    self.evict("its stage was given up" if opened.stopped.is_set() else "its worker was lost")
                    opened.finished.pop(label, None)
                    opened.cpu_seconds += time.thread_time() - began_cpu
                    at_work.discard(self)
                    dispatch.wake()

    def evict(self, reason: str) -> None:
        """What still runs on its behalf is to begin again."""
        with self.dispatch as dispatch:
            running = [key for key, attempt in self.attempts.items() if dispatch.is_running(key, attempt)]
            dispatch.tell(*(happened.RolloutEvicted(*key, reason) for key in running))

    def _is_held(self) -> bool:
        """Wait for the weights that the shard is to begin on, where it was admitted while they were on their way; False when it
        is not wanted any more."""
        with self.dispatch as dispatch:
            while not self.opened.stopped.is_set():
                held = dispatch.controller.replicas[ENGINE].version
                if held is not None and held >= self.version:
                    return True
                ACTIVITY.advance()
                dispatch.wait(LOOK_SECONDS)
        return False

    def _carry_out(self, token: str) -> ShardOutcome:
        opened, shard = self.opened, self.shard
        assert opened.workers is not None, "a shard that has begun was missing when its collection was opened"
        began, _ = opened.spans.get(shard.label, (time.monotonic(), 0.0))
        try:
            opened.workers.run(shard.task.began_on(self.version), partial(self._heard, token), opened.stopped)
        finally:
            opened.spans[shard.label] = began, time.monotonic()
        return opened.attempt.outcome(shard.shard, shard.task)

    def _take(self, outcome: ShardOutcome) -> None:
        """The shard is whole: tell what became of each rollout."""
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
            self.opened.outcomes[outcome.label] = outcome

    def _lost(self, error: InfraError) -> None:
        """Its rollouts begin again after a while, unless too many of the shard's workers were lost."""
        opened, label = self.opened, self.shard.label
        if opened.stopped.is_set():
            return
        opened.attempt.lost += 1
        opened.losses[label] += 1
        if (losses := opened.losses[label]) > self.restarts:
            opened.error = error
            return
        log.warning("%s of iteration %d was lost and is collected on: %s", label, opened.iteration, error)
        opened.stopped.wait(FIRST_PAUSE_SECONDS * 2 ** (losses - 1))

    def _heard(self, token: str, line: str) -> None:
        """The worker said something, in whatever thread."""
        ACTIVITY.advance(token)
        label = self.shard.label
        if (finished := finished_in(line)) is not None:
            self.opened.finished[label] = finished
        else:
            log.info("iteration %d, %s: %s", self.opened.iteration, label, line)
