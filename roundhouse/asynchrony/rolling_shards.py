"""The generation lane over shards (`rollout.distribution`): what the controller admits one by one, a worker is given at once.

Invariants: a shard is whole groups of one iteration, next to each other in the plan, so that the controller admits what is
missing of it in one go, on one version; it begins when its iteration's collection is open, and no more than
`rollout.distribution.shards` are at work at once, whatever iterations they are of. What a worker made is in the store before
the controller hears that it finished; when a worker has ended, none of its rollouts runs: each has its outcome, or is to begin
again, on whatever version the engine holds then. When the lane ends, however it ends, no worker is left at work.

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

from roundhouse.asynchrony import events as happened
from roundhouse.asynchrony.decisions import Continue
from roundhouse.asynchrony.dispatch import ENGINE, Dispatch
from roundhouse.asynchrony.open_shards import AtWork, OpenShard, OpenShards
from roundhouse.asynchrony.plan import Plan
from roundhouse.asynchrony.recovery import written_rollouts
from roundhouse.asynchrony.resumption import forget
from roundhouse.asynchrony.rolling import END_SECONDS, LOOK_SECONDS, Progress
from roundhouse.asynchrony.rollouts import Key
from roundhouse.config.distribution import Shards
from roundhouse.errors import InfraError
from roundhouse.health.activity import ACTIVITY
from roundhouse.health.watchdog import Interrupted
from roundhouse.stages import parts as stage_parts
from roundhouse.stages.child_process import Stopped
from roundhouse.stages.distributed import FIRST_PAUSE_SECONDS
from roundhouse.stages.shard_worker import finished_in
from roundhouse.stages.shard_workers import workers_of
from roundhouse.stages.sharded_attempt import Outcome, ShardedAttempt
from roundhouse.stages.shards import split
from roundhouse.store.cpu import beside
from roundhouse.store.run import Run
from roundhouse.trajectories.records import Rollout, Status

log = logging.getLogger(__name__)


class RollingShards:
    """See the module's docstring. It is to its stages and to `Overlap` what `Rolling` is."""

    def __init__(self, run: Run, plan: Plan, dispatch: Dispatch, engine_url: str) -> None:
        distribution = run.config.rollout.distribution
        assert isinstance(distribution, Shards), "who collects together needs no shards"
        self.plan = plan
        self.url = engine_url
        self.error: BaseException | None = None
        """What ended the lane."""
        self.ended = threading.Event()
        self.wanted: int | None = None
        """An iteration whose collection is to be opened, because its first rollout may begin."""
        self._run = run
        self._distribution = distribution
        self._dispatch = dispatch
        self._open: dict[int, OpenShards] = {}
        self._at_work: set[AtWork] = set()
        self._stopped = threading.Event()
        self._ending_seconds = 0.0
        """How long workers take to end."""
        self._cpu_seconds = self._spent_seconds = 0.0
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._work), name="generation lane", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the lane: workers are told to end, and write down what had finished.

        Raises:
            InfraError: it does not end.
        """
        self._stopped.set()
        self._dispatch.wake()
        limit = END_SECONDS + self._ending_seconds
        if self._thread.is_alive():
            self._thread.join(limit)
        if self._thread.is_alive():
            raise InfraError(f"The generation lane has not ended within {limit:g} s.")

    # From the stage's thread

    def open(self, iteration: int, attempt: ShardedAttempt, progress: Progress | None = None) -> OpenShards:
        """Let an iteration's shards begin; what earlier attempts finished is kept.

        Raises:
            InfraError: the lane has ended, or what workers run on does not answer.
        """
        if self.ended.is_set():
            raise self.error or InfraError("The generation lane has ended.")
        shards = self._shards(iteration, attempt)
        with self._dispatch as dispatch:
            groups = dispatch.controller.rollouts.groups
            counted = {
                key for key in self.plan.keys(iteration) if key[0] in groups and key[1] in groups[key[0]].versions
            }
        outcomes = self._whole(iteration, attempt, [each for each in shards if counted.issuperset(each.keys)])
        missing = [each for each in shards if each.label not in outcomes]
        kept = {key for each in shards for key in each.keys if key in counted}
        kept -= {
            key for each in missing if counted.issuperset(each.keys) for key in each.keys
        }  # lost since it was told
        with ExitStack() as stack:
            tasks = [each.task for each in missing]
            workers = stack.enter_context(workers_of(self._run, tasks)) if tasks else None
            context = contextvars.copy_context()
            opened = OpenShards(iteration, attempt, shards, outcomes, workers, stack.pop_all(), context, progress)
        self._ending_seconds = max(self._ending_seconds, 0.0 if workers is None else workers.ending_seconds)
        with self._dispatch as dispatch:
            forget(dispatch.controller, dispatch, self.plan, iteration, kept)
            self._open[iteration] = opened
            self.wanted = None
            dispatch.wake()
        return opened

    def wait(self, opened: OpenShards) -> bool:
        """Wait until all of its shards are whole; False when the lane ends before.

        Raises:
            Exception: what a worker met that another one would meet again, or the last of too many losses.
        """
        while True:
            with self._dispatch as dispatch:
                if opened.error is not None:
                    raise opened.error
                if opened.complete or self.ended.is_set():
                    break
                waits_for_others = not self._stopped.is_set() and not self._of(opened)
                dispatch.wait(LOOK_SECONDS)
            opened.tell()
            if waits_for_others:
                ACTIVITY.advance()  # as in `Rolling.wait`
        opened.tell()
        return opened.complete

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

    def window_seconds(self, positions: Collection[int]) -> float:
        """Told by each collect stage of its own."""
        return 0.0

    def flush(self) -> None:
        """Write down the controller's events; what they tell is in the store."""
        self._dispatch.record()

    def spend(self) -> float:
        """CPU seconds of the lane's thread that were not told of before."""
        with self._dispatch:
            spent, self._spent_seconds = self._cpu_seconds - self._spent_seconds, self._cpu_seconds
        return spent

    def _shards(self, iteration: int, attempt: ShardedAttempt) -> list[OpenShard]:
        """Each with its share of `rollout.concurrency`, which is the same for all: any of them may be at work at once."""
        config, count = self._run.config, self._distribution.shards
        share = max(1, config.rollout.concurrency // count)
        keys = self.plan.keys(iteration)
        return [
            OpenShard(
                shard,
                attempt.task(shard, config.generation.sampling, self.url, share),
                tuple(islice(keys, len(shard.specs))),
            )
            for shard in split(self.plan.specs(iteration), count)
        ]

    def _whole(self, iteration: int, attempt: ShardedAttempt, shards: list[OpenShard]) -> dict[str, Outcome]:
        """Shards that need no worker: their rollouts are in the store."""
        found: dict[str, Outcome] = {}
        written: dict[str, Rollout] | None = None
        for each in shards:
            outcome = attempt.left_before(each.shard, each.task)
            if outcome is None:
                if written is None:
                    place = self._run.stage(iteration, "collect").location
                    written = {rollout.rollout_id: rollout for rollout in written_rollouts(place)}
                outcome = attempt.taken_over(each.shard, written)
            if outcome is not None:
                found[each.label] = outcome
        return found

    def _of(self, opened: OpenShards | None) -> list[AtWork]:
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
            self._evict(work, "its worker does not end")

    # In the lane's thread

    def _work(self) -> None:
        try:
            with beside():
                self._admit()
        except BaseException as error:  # noqa: BLE001 - raised again where the lane is driven from
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
                context = begun.opened.context.copy()
                name = f"shard {begun.shard.label} of iteration {begun.opened.iteration}"
                threading.Thread(target=partial(context.run, self._collect, begun), name=name, daemon=True).start()
            if time.monotonic() - recorded >= stage_parts.FLUSH_SECONDS:
                self._dispatch.record()
                recorded = time.monotonic()

    def _begin(self) -> AtWork | None:
        """The next shard, with all of its rollouts that the controller admits; None while none may begin."""
        controller = self._dispatch.controller
        if len(self._at_work) >= self._distribution.shards:
            return None
        given = controller.admission(ENGINE)
        if not isinstance(given, Continue):
            return None
        iteration, version = self.plan.iteration_of(given.position), given.version
        if (opened := self._open.get(iteration)) is None:
            if self.wanted != iteration:
                self.wanted = iteration
                self._dispatch.wake()
            return None
        if opened.error is not None:  # its stage is about to close it
            return None
        shard = opened.of((given.position, given.sample))
        attempts: dict[Key, int] = {}
        while isinstance(given, Continue) and shard.holds(key := (given.position, given.sample)):
            attempts[key] = given.attempt
            self._dispatch.tell(happened.RolloutStarted(*key, given.attempt, ENGINE))
            given = controller.admission(ENGINE)
        work = AtWork(opened, shard, version, attempts)
        self._at_work.add(work)
        return work

    # In the thread of a worker

    def _collect(self, work: AtWork) -> None:
        opened, label = work.opened, work.shard.label
        with beside():
            began_cpu = time.thread_time()
            try:
                if self._is_held(work):
                    with ACTIVITY.track("collect", "shard", label) as token:
                        self._take(work, self._carry_out(work, token))
            except InfraError as error:
                self._lost(work, error)
            except Stopped:
                pass
            except Exception as error:  # noqa: BLE001 - the stage raises it
                opened.error = error
            finally:
                with self._dispatch as dispatch:
                    self._evict(work, "its stage was given up" if opened.stopped.is_set() else "its worker was lost")
                    opened.finished.pop(label, None)
                    opened.cpu_seconds += time.thread_time() - began_cpu
                    self._at_work.discard(work)
                    dispatch.wake()

    def _is_held(self, work: AtWork) -> bool:
        """Wait for the weights that a shard is to begin on, where it was admitted while they were on their way; False when it
        is not wanted any more."""
        with self._dispatch as dispatch:
            while not work.opened.stopped.is_set():
                held = dispatch.controller.replicas[ENGINE].version
                if held is not None and held >= work.version:
                    return True
                ACTIVITY.advance()
                dispatch.wait(LOOK_SECONDS)
        return False

    def _carry_out(self, work: AtWork, token: str) -> Outcome:
        opened, shard = work.opened, work.shard
        assert opened.workers is not None, "a shard that has begun was missing when its collection was opened"
        opened.began = opened.began or time.monotonic()
        try:
            opened.workers.run(shard.task.began_on(work.version), partial(self._heard, work, token), opened.stopped)
        finally:
            opened.ended = time.monotonic()
        return opened.attempt.outcome(shard.shard, shard.task)

    def _take(self, work: AtWork, outcome: Outcome) -> None:
        """The shard is whole: tell what became of each rollout."""
        with self._dispatch as dispatch:
            events: list[happened.Event] = []
            for key, rollout in zip(work.shard.keys, outcome.rollouts, strict=True):
                attempt = work.attempts.get(key)
                if attempt is None or not dispatch.is_running(key, attempt):
                    continue
                if rollout.status is Status.FAILED:
                    reason = rollout.failure_code or "failed"
                    events.append(happened.RolloutFailed(*key, attempt, reason, final=True))
                else:
                    events.append(happened.RolloutFinished(*key, attempt))
            dispatch.tell(*events)
            work.opened.outcomes[outcome.label] = outcome

    def _lost(self, work: AtWork, error: InfraError) -> None:
        """Its rollouts begin again after a while, unless too many of its workers were lost."""
        opened, label = work.opened, work.shard.label
        if opened.stopped.is_set():
            return
        opened.attempt.lost += 1
        opened.losses[label] += 1
        if (losses := opened.losses[label]) > self._distribution.restarts:
            opened.error = error
            return
        log.warning("%s of iteration %d was lost and is collected on: %s", label, opened.iteration, error)
        opened.stopped.wait(FIRST_PAUSE_SECONDS * 2 ** (losses - 1))

    def _evict(self, work: AtWork, reason: str) -> None:
        """What still runs on a worker's behalf is to begin again."""
        with self._dispatch as dispatch:
            running = [key for key, attempt in work.attempts.items() if dispatch.is_running(key, attempt)]
            dispatch.tell(*(happened.RolloutEvicted(*key, reason) for key in running))

    def _heard(self, work: AtWork, token: str, line: str) -> None:
        """A worker said something, in whatever thread."""
        ACTIVITY.advance(token)
        if (finished := finished_in(line)) is not None:
            work.opened.finished[work.shard.label] = finished
        else:
            log.info("iteration %d, %s: %s", work.opened.iteration, work.shard.label, line)
