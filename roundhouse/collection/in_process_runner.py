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
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roundhouse.activity import ACTIVITY, Interrupted, announce, run_interruptible
from roundhouse.collection import collector
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
from roundhouse.config.models import RolloutConfig, RunConfig, Sampling
from roundhouse.config.rollout import Asynchrony, InProcessCollection
from roundhouse.errors import InfraError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.protocol import PolicyClient
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient, retry_delay
from roundhouse.rollout.recording import run_branch
from roundhouse.rollout.replay import RecordedCalls, TurnJournal
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage
from roundhouse.trajectories.records import FailureKind, Rollout, Status

log = logging.getLogger(__name__)

FLUSH_PATIENCE_SECONDS = 300.0


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
    collection: RolloutCollection = field(init=False)
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
        opened.collection = RolloutCollection.of(
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
            await asyncio.sleep(max(collector.FLUSH_SECONDS, collector.SHORTEST_SECONDS))
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
        """Collect what is missing of `specs`; again for another round. `on_policy` as for `RolloutCollection.of`.

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
        try:
            runner.start()
            opened = runner.open(version + 1, self._attempt, progress)
            is_whole = runner.wait(opened)
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


async def _run(spec: RolloutSpec, *arguments: Any, **options: Any) -> Rollout:
    return await (run_rollout if spec.branch is None else run_branch)(spec, *arguments, **options)


class RolloutCollection:
    """Rollouts that are made together: what one failure says about the others.

    It stops asking an engine or environment that is gone: an `Outage` opens only when `threshold` rollouts in a row, each
    after all its attempts, failed for infrastructure. Any other outcome in between shows that something still works and starts
    the count anew. Once open, it stays open. Without it a collection of 10,000 rollouts would try each of them three times
    against a dead engine. A `RetryBudget` bounds the retries where not everything fails: where one rollout in three does, three
    attempts each would hide it and cost a half more.
    """

    @classmethod
    def of(
        cls,
        specs: Sequence[RolloutSpec],
        policy: PolicyClient,
        environment: EnvironmentClient,
        config: RolloutConfig,
        sampling: Sampling,
        *,
        on_policy: bool = True,
        policy_version: int | None = None,
        journal: TurnJournal | None = None,
    ) -> RolloutCollection:
        """For `roll_out` of each of `specs`, in any order.

        Args:
            on_policy: they are to be trained on; a row that asks for another sampling than `sampling` then fails.
            policy_version: version that the engine holds, for agents whose answers do not have it.
            journal: model calls that were finished before, and where those of each attempt are recorded; also an attempt that
                follows on an infrastructure failure here resumes after them. Without one, each starts from its first call.
        """
        play = partial(
            _run,
            policy=policy,
            environment=environment,
            config=config,
            sampling=sampling,
            on_policy=on_policy,
            policy_version=policy_version,
        )
        recorded = None if journal is None else partial(journal.recorded, restoration=environment.restoration)
        return cls(specs, play, environment.name, config, recorded)

    def __init__(
        self,
        specs: Sequence[RolloutSpec],
        play: Callable[..., Awaitable[Rollout]],
        environment_name: str,
        config: RolloutConfig,
        recorded: Callable[[RolloutSpec], RecordedCalls] | None,
    ) -> None:
        self._play = play
        self._environment_name = environment_name
        self._config = config
        self._recorded = recorded
        self._outage = Outage(min(config.concurrency or len(specs), len(specs)))
        self._budget = RetryBudget(len(specs), config.retry.budget_fraction, config.retry.budget_seconds)

    async def roll_out(self, spec: RolloutSpec, **given: Any) -> Rollout:
        """One of them, to its outcome, which does not raise; `given` overrides what `of` has for all."""
        with ACTIVITY.track("collect", "rollout", spec.rollout_id):
            rollout = self._not_tried(spec) if self._outage.open else await self._try(spec, given)
        if rollout.status is Status.FAILED:
            log.info("%s failed: %s: %s", rollout.rollout_id, rollout.failure_code, rollout.failure_detail)
        was_open = self._outage.open
        self._outage.record(rollout)
        if self._outage.open and not was_open:
            log.warning(
                "The last %d rollouts all failed for infrastructure (%s: %s); those not begun yet are not tried.",
                self._outage.threshold,
                rollout.failure_code,
                rollout.failure_detail,
            )
        return rollout

    async def _try(self, spec: RolloutSpec, given: Mapping[str, Any]) -> Rollout:
        """Attempts until one is not an infrastructure failure, or none is left."""
        retry = self._config.retry
        attempt = 1
        while True:
            recorded = None if self._recorded is None else self._recorded(spec)
            rollout = await self._play(spec, attempt=attempt, recorded=recorded, **given)
            if rollout.failure_kind is not FailureKind.INFRA or attempt >= retry.attempts or self._outage.open:
                return rollout
            if not self._budget.take(time.monotonic()):
                log.info("%s: %s, and the budget of retries is spent", rollout.rollout_id, rollout.failure_code)
                return rollout
            delay = retry_delay(retry, attempt, spec.seed)
            log.info("%s: %s, attempt %d; again in %.1f s", rollout.rollout_id, rollout.failure_code, attempt, delay)
            await asyncio.sleep(delay)
            attempt += 1

    def _not_tried(self, spec: RolloutSpec) -> Rollout:
        last = self._outage.last
        assert last is not None
        return Rollout(
            group_id=spec.group_id,
            sample=spec.sample,
            task=spec.row,
            environment=self._environment_name,
            status=Status.FAILED,
            attempt=0,
            seed=spec.seed,
            failure_kind=FailureKind.INFRA,
            failure_code=last.failure_code,
            failure_detail=f"Not tried: {self._outage.threshold} rollouts before it failed in a row. {last.failure_detail}",
        )


SMALLEST_THRESHOLD = 4
"""A few rollouts fail alone for reasons of their own, even when they run one at a time."""


class Outage:
    """Watches the finished rollouts of one collection with `workers` in flight."""

    def __init__(self, workers: int) -> None:
        # One whole wave: with all in flight at once, a shorter row may be a single hiccup that hit them together.
        self.threshold = max(workers, SMALLEST_THRESHOLD)
        self._in_a_row = 0
        self.last: Rollout | None = None
        """The failure that opened it."""

    @property
    def open(self) -> bool:
        return self.last is not None

    def record(self, rollout: Rollout) -> None:
        """Take note of a finished rollout."""
        infra = rollout.status is Status.FAILED and rollout.failure_kind is FailureKind.INFRA
        self._in_a_row = self._in_a_row + 1 if infra else 0
        if self._in_a_row >= self.threshold and self.last is None:
            self.last = rollout


class RetryBudget:
    """The retries of one collection: at most `fraction` of its rollouts, and none later than `seconds` after the first."""

    def __init__(self, rollouts: int, fraction: float | None, seconds: float | None) -> None:
        self._left = math.inf if fraction is None else math.ceil(rollouts * fraction)
        self._seconds = seconds
        self._first_at: float | None = None

    def take(self, now: float) -> bool:
        """Whether there may be one more retry at this time, in seconds of any clock that does not run backwards."""
        first_at = now if self._first_at is None else self._first_at
        if self._left < 1 or (self._seconds is not None and now - first_at > self._seconds):
            return False
        self._first_at, self._left = first_at, self._left - 1
        return True
