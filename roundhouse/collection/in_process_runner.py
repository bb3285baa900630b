"""The runner in this process: one event loop rolls out whatever the controller admits, for all open iterations at once.

Invariant: those of `runner`; what finished is in the parts of its iteration before the journal says so.

`Collector` collects with one policy version and waits for no training step: the loop of `runner` at staleness 0. Invariant:
when its `collect` returns, each rollout that was asked for is in the store with its turns, and `commit` makes exactly these
the stage's datasets, once each. When `collect` returns or raises, nothing of it is left at work, and what had finished is on
disk.

    specs ── one iteration of a plan ──> controller, at staleness 0 ──> runner: in this process, or by shards ──> rollouts

What earlier attempts at the stage finished is in the store, so that the controller needs no journal.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundhouse.activity import GRACE_SECONDS, Interrupted, Supervision, announce, run_interruptible
from roundhouse.collection import collector as stage_collector
from roundhouse.collection import controller as happened
from roundhouse.collection.collector import Collected, Parts, Progress
from roundhouse.collection.controller import Continue, Controller, Restarted
from roundhouse.collection.pool import Key, PlannedRollouts, StalenessBound
from roundhouse.collection.runner import (
    END_SECONDS,
    ENGINE,
    LOOK_SECONDS,
    CollectAttempt,
    Dispatch,
    RolloutRunner,
    finished_rollouts,
    forget,
    window_of,
)
from roundhouse.config.models import RunConfig, Sampling
from roundhouse.config.rollout import Asynchrony, InProcessCollection
from roundhouse.errors import InfraError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.rollout import collector
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage
from roundhouse.trajectories.records import Rollout, Status

FLUSH_PATIENCE_SECONDS = 300.0
INTERRUPT_SECONDS = GRACE_SECONDS / 5
"""For the event loop of a stage that its watchdog has given up to be cancelled, then for its thread to be interrupted: both
within the time that the stage has to end."""


@dataclass
class OpenCollection:
    """An iteration whose rollouts may begin."""

    iteration: int
    attempt: Parts
    context: contextvars.Context
    """Of its stage, so that its rollouts are signs of life of this stage."""
    progress: Progress | None
    keys: tuple[Key, ...] = ()
    """Of the rollouts of the rounds that have begun, in the plan's order."""
    collection: collector.RolloutCollection = field(init=False)
    """Of the newest of these rounds: those before it are complete."""
    rollouts: dict[Key, Rollout] = field(default_factory=dict)
    running: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    spans: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of what finished in this attempt, of one clock."""

    @property
    def planned(self) -> int:
        return len(self.keys)

    @property
    def complete(self) -> bool:
        return len(self.rollouts) == self.planned

    @property
    def window_seconds(self) -> float:
        return window_of(self.spans.values())

    def made(self) -> list[Rollout]:
        return [self.rollouts[key] for key in self.keys if key in self.rollouts]

    def settle(self) -> list[Rollout]:
        return self.made()


class InProcessRunner(RolloutRunner[OpenCollection, Parts]):
    """See the module's docstring."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ready = threading.Event()
        self._left = threading.Event()
        """The event loop has ended."""
        self._running = 0

    # From the stage's thread

    def open(self, iteration: int, attempt: Parts, progress: Progress | None = None) -> OpenCollection:
        while not self._ready.wait(LOOK_SECONDS):
            pass
        self._refuse_ended()
        opened = OpenCollection(iteration, attempt, contextvars.copy_context(), progress)
        with self._dispatch as dispatch:
            pool, number = dispatch.controller.pool, 0
            while number < pool.rounds_of(iteration):  # fewer when a round turns out to have lost a rollout
                number += 1
                specs = dict(zip(self.plan.keys(iteration, number), self.plan.specs(iteration, number), strict=True))
                kept = self._enter(opened, specs, [key for key in specs if pool.has_left(key[0]) or key in pool])
                forget(dispatch, specs, kept)
            return self._register(opened)

    def _begin_round(self, opened: OpenCollection, number: int) -> None:
        iteration = opened.iteration
        specs = dict(zip(self.plan.keys(iteration, number), self.plan.specs(iteration, number), strict=True))
        with self._dispatch as dispatch:
            kept = self._enter(opened, specs, specs)
            dispatch.tell(happened.RoundStarted(iteration, number, tuple(finished_rollouts(kept, iteration - 1))))

    def _enter(
        self, opened: OpenCollection, specs: Mapping[Key, RolloutSpec], counted: Iterable[Key]
    ) -> dict[Key, Rollout]:
        """Make the rollouts of a round the collection's; returns those of `counted` that earlier attempts finished."""
        parts = opened.attempt
        by_id = parts.keep([specs[key] for key in counted])
        kept = {key: by_id[spec.rollout_id] for key, spec in specs.items() if spec.rollout_id in by_id}
        opened.keys += tuple(specs)
        opened.rollouts |= kept
        opened.collection = collector.RolloutCollection.of(
            [spec for key, spec in specs.items() if key not in kept],
            self._policy,
            self._environment,
            self.config.rollout,
            self.sampling,
            on_policy=self.on_policy,
            journal=parts.journal,
        )
        return kept

    def at_hand(self, positions: Iterable[int]) -> dict[int, list[Rollout]]:
        found = {}
        for position in positions:
            if (opened := self._open.get(self.plan.iteration_of(position))) is not None:
                rollouts = [opened.rollouts.get(key) for key in self.plan.samples(position)]
                if None not in rollouts:
                    found[position] = [rollout for rollout in rollouts if rollout is not None]
        return found

    def window_seconds(self, positions: Collection[int]) -> float:
        spans = [span for opened in self._open.values() for key, span in opened.spans.items() if key[0] in positions]
        return window_of(spans)

    def flush(self) -> None:
        if not self._ready.is_set() or self.ended.is_set():
            self._dispatch.record()
            return
        flushed = asyncio.run_coroutine_threadsafe(self._flush(), self._loop)
        try:
            flushed.result(FLUSH_PATIENCE_SECONDS)
        except TimeoutError as error:
            raise InfraError(
                f"The rollout runner has written nothing down for {FLUSH_PATIENCE_SECONDS:g} s."
            ) from error

    def close(self, iteration: int) -> None:
        with self._dispatch as dispatch:
            opened = self._open.pop(iteration, None)
            if opened is None:
                return
            for key, task in list(opened.running.items()):
                if key in dispatch.controller.pool.running:
                    dispatch.tell(happened.RolloutEvicted(*key, "its stage was given up"))
                self._call_soon(task.cancel)

    def interrupt(self) -> None:
        def end(supervision: Supervision[None]) -> None:
            if not self._left.wait(INTERRUPT_SECONDS):
                supervision.interrupt(INTERRUPT_SECONDS, until=self._left)

        if self._supervision is not None:  # in a thread that is not interrupted, as the caller's is again and again
            threading.Thread(target=end, args=(self._supervision,), daemon=True).start()

    def _is_at_work(self, opened: OpenCollection) -> bool:
        return bool(opened.running)

    def _interrupt(self) -> None:
        if self._ready.is_set() and not self.ended.is_set():
            self._call_soon(self._main.cancel)

    # In the runner's thread

    def _run(self) -> None:
        try:
            try:
                run_interruptible(self._work())
            finally:  # however the event loop ended
                self._left.set()
                self._write_down()
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the generation loop
            self.error = error
        finally:
            self.ended.set()
            self._ready.set()
            self._dispatch.wake()

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._change = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        self._dispatch.listen(self._look_again)
        environment = open_environment(self.config.environment, self.config.store)
        try:
            async with HttpPolicyClient(self.url, self.config.generation) as policy, environment:
                self._policy = policy
                self._environment: EnvironmentClient = environment
                async with asyncio.TaskGroup() as group:
                    self._ready.set()
                    if self._stopped.is_set():
                        task.cancel()
                    group.create_task(self._flush_again_and_again())
                    await self._admit(group)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _admit(self, group: asyncio.TaskGroup) -> None:
        slots = self.config.rollout.concurrency or math.inf
        while True:
            change = self._change
            while self._running < slots and (begun := self._begin()) is not None:
                given, opened = begun
                key = (given.position, given.sample)
                self._running += 1
                opened.running[key] = group.create_task(
                    self._roll_out(given, opened), name=f"rollout {key}", context=opened.context.copy()
                )
            await change.wait()

    def _begin(self) -> tuple[Continue, OpenCollection] | None:
        with self._dispatch as dispatch:
            if (begun := self._admitted()) is not None:
                given, _ = begun
                dispatch.tell(happened.RolloutStarted(given.position, given.sample, given.attempt, ENGINE))
        return begun

    async def _roll_out(self, given: Continue, opened: OpenCollection) -> None:
        key = (given.position, given.sample)
        try:
            # A rollout that was admitted during a transfer begins on the new weights
            while (held := self._dispatch.controller.replicas[ENGINE].version) is None or held < given.version:
                change = self._change
                if self._dispatch.controller.replicas[ENGINE].version == held:
                    await change.wait()
            began = time.monotonic()
            rollout = await opened.collection.roll_out(self.plan.spec(key), policy_version=given.version)
            opened.spans[key] = began, time.monotonic()
            with self._dispatch as dispatch:
                if self._open.get(opened.iteration) is opened and dispatch.is_running(key, given.attempt):
                    opened.attempt.add(rollout)
                    opened.rollouts[key] = rollout
                    announce(
                        "rollout",
                        tokens=rollout.generated_tokens,
                        reward=rollout.reward,
                    )
                    if rollout.status is Status.FAILED:
                        self._dispatch.tell(
                            happened.RolloutFailed(*key, given.attempt, rollout.failure_code or "failed", final=True)
                        )
                    else:
                        self._dispatch.tell(happened.RolloutFinished(*key, given.attempt))
                    if opened.progress is not None:
                        opened.progress(len(opened.rollouts), opened.planned)
        finally:
            opened.running.pop(key, None)
            self._running -= 1
            self._look_again()

    async def _flush(self) -> None:
        self._write_down()

    def _write_down(self) -> None:
        for opened in list(self._open.values()):
            opened.attempt.flush()
        self._dispatch.record()
        self._count_cpu()

    async def _flush_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(max(stage_collector.FLUSH_SECONDS, stage_collector.SHORTEST_SECONDS))
            self._write_down()

    def _look_again(self) -> None:
        self._call_soon(self._on_change)

    def _on_change(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _call_soon(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the runner has ended, and its event loop with it
            self.ended.set()


def begin_attempt(run: Run, stage: Stage, policy_version: int, oldest_version: int | None = None) -> CollectAttempt:
    """A new attempt at a stage, by what `rollout.distribution` names. `policy_version` is the one that is collected; where
    older ones may be too, those from `oldest_version` on."""
    if isinstance(run.config.rollout.distribution, InProcessCollection):
        return Parts(run.begin(stage, policy_version=policy_version), policy_version, oldest_version)
    from roundhouse.collection.sharded_attempt import ShardedAttempt

    return ShardedAttempt(run, stage, policy_version, oldest_version)


def runner_of(
    config: RunConfig, plan: PlannedRollouts, dispatch: Dispatch, engine_url: str, **options: Any
) -> RolloutRunner[Any, Any]:
    """The runner that `rollout.distribution` names; options as of `RolloutRunner`."""
    if isinstance(config.rollout.distribution, InProcessCollection):
        return InProcessRunner(config, plan, dispatch, engine_url, **options)
    from roundhouse.collection.shard_runner import ShardRunner

    return ShardRunner(config, plan, dispatch, engine_url, **options)


def planned(specs: Sequence[RolloutSpec], version: int) -> PlannedRollouts:
    """A plan whose one iteration, that trains from `version`, is these rollouts, each a group of its own."""
    bound = StalenessBound(
        Asynchrony(),
        groups=len(specs),
        group_size=1,
        iterations=version + 1,
        first_version=version,
        evaluates_first=False,
    )
    return PlannedRollouts(bound, lambda *_: specs)


class Collector:
    """Of one attempt at a stage; see the module's docstring."""

    def __init__(self, config: RunConfig, attempt: CollectAttempt, version: int) -> None:
        """`version` is the one that the engine holds."""
        self._config = config
        self._attempt = attempt
        self._version = version
        self.metrics, self.commit, self.whole = attempt.metrics, attempt.commit, attempt.whole

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        """Collect what is missing of `specs`; again for another round. `on_policy` as for `rollout.collector.collect`.

        Raises:
            InfraError: a shard lost more workers than `rollout.distribution.restarts`.
            StoreError: what finished cannot be written down.
        """
        version, plan = self._version, planned(specs, self._version)
        dispatch, there = Dispatch(Controller(plan.bound)), self._attempt.finished(specs)
        keys = zip(plan.keys(version + 1), specs, strict=True)
        finished = tuple((*key, version) for key, spec in keys if spec.rollout_id in there)
        dispatch.tell(Restarted(version, finished, ((ENGINE, version),)))
        runner = runner_of(self._config, plan, dispatch, engine_url, sampling=sampling, on_policy=on_policy)
        runner.start()
        try:
            opened = runner.open(version + 1, self._attempt, progress)
            is_whole = runner.wait(opened)
        except Interrupted:
            runner.interrupt()
            raise
        finally:
            _end(runner, version + 1)
        if not is_whole or runner.error is not None:
            raise runner.error or InfraError("The rollout runner has ended before the rollouts.")
        self._attempt.charge(runner.spend())
        return Collected(opened.settle(), opened.window_seconds)


def open_collector(run: Run, stage: Stage, policy_version: int) -> Collector:
    """A new attempt at a stage."""
    return Collector(run.config, begin_attempt(run, stage, policy_version), policy_version)


def _end(runner: RolloutRunner[Any, Any], iteration: int) -> None:
    """End a runner, which writes down what finished. To interrupt it again changes nothing."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            runner.stop()
            runner.close(iteration)
            return
        except Interrupted:
            if time.monotonic() > deadline:
                raise
