"""A worker of the generation loop, and the rollouts that the controller counts as running on its behalf.

Invariant: what it made is in the store before the controller hears of it; when it has ended, none of its rollouts runs: each
has its outcome, or is to begin again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from roundhouse.collection import events as happened
from roundhouse.collection.dispatch import ENGINE, Dispatch
from roundhouse.collection.in_process_runner import LOOK_SECONDS
from roundhouse.collection.open_shards import OpenShard, OpenShards
from roundhouse.collection.rollouts import Key
from roundhouse.collection.shard_worker import finished_in
from roundhouse.collection.sharded_attempt import ShardOutcome
from roundhouse.collection.sharded_collector import FIRST_PAUSE_SECONDS
from roundhouse.errors import InfraError
from roundhouse.health.activity import ACTIVITY
from roundhouse.launch.child_process import Stopped
from roundhouse.store.cpu_accounting import attribute_to_this_stage
from roundhouse.trajectories.records import Status

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
