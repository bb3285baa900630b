"""Runner in this process: one event loop plays all rollouts that the controller admits, for all open iterations.

Invariant: as in `runner`; finished rollouts are in their iteration's parts before the journal records them.

`Collector` collects with one policy version and does not wait for training steps: the loop of `runner` at staleness 0.
Invariant:
when `collect` returns, each requested rollout is stored with its turns, and `commit` publishes exactly these as the
stage's datasets,
once each. When `collect` returns or raises, all its work has stopped and finished rollouts are stored.

    specs ── one iteration of a plan ──> controller, at staleness 0 ──> runner: in this process, or by shards ──>
    rollouts

The store holds everything that earlier attempts finished, so the controller needs no journal.
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
from roundhouse.config.rollout import Asynchrony
from roundhouse.errors import InfraError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.protocol import PolicyClient
from roundhouse.health.policy import code_of_type
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient, EnvironmentRestarted, retry_delay
from roundhouse.rollout.recording import run_branch
from roundhouse.rollout.replay import RecordedCalls, TurnJournal
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage
from roundhouse.trajectories.records import FailureKind, Rollout, Status

log = logging.getLogger(__name__)

FLUSH_PATIENCE_SECONDS = 300.0
RESTARTED = code_of_type(EnvironmentRestarted.__name__)


@dataclass
class OpenCollection:
    """An open iteration: its rollouts may start."""

    iteration: int
    attempt: Parts
    context: contextvars.Context
    """Context of the stage, so that its rollouts count as the stage's progress."""
    progress: Progress | None
    keys: tuple[Key, ...] = ()
    """Keys of the rollouts of all started rounds, in plan order."""
    collection: RolloutCollection = field(init=False)
    """Collection of the newest round; earlier rounds are complete."""
    rollouts: dict[Key, Rollout] = field(default_factory=dict)
    running: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    spans: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """Start and end of each rollout finished in this attempt, by one clock."""

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
                earlier = self._enter(opened, specs, [key for key in specs if pool.has_left(key[0]) or key in pool])
                forget(dispatch, specs, earlier)
            return self._register(opened)

    def _begin_round(self, opened: OpenCollection, number: int) -> None:
        iteration = opened.iteration
        specs = dict(zip(self.plan.keys(iteration, number), self.plan.specs(iteration, number), strict=True))
        with self._dispatch as dispatch:
            earlier = self._enter(opened, specs, specs)
            dispatch.tell(happened.RoundStarted(iteration, number, tuple(finished_rollouts(earlier, iteration - 1))))

    def _enter(
        self, opened: OpenCollection, specs: Mapping[Key, RolloutSpec], counted: Iterable[Key]
    ) -> dict[Key, Rollout]:
        """Make the rollouts of a round the collection's; returns those of `counted` that earlier attempts finished."""
        parts = opened.attempt
        by_id = parts.keep([specs[key] for key in counted])
        earlier = {key: by_id[spec.rollout_id] for key, spec in specs.items() if spec.rollout_id in by_id}
        opened.keys += tuple(specs)
        opened.rollouts |= earlier
        opened.collection = RolloutCollection.of(
            [spec for key, spec in specs.items() if key not in earlier],
            self._policy,
            self._environment,
            self.config.rollout,
            self.sampling,
            on_policy=self.on_policy,
            journal=parts.journal,
        )
        return earlier

    def at_hand(self, positions: Iterable[int]) -> dict[int, list[Rollout]]:
        complete = {}
        for position in positions:
            if (opened := self._open.get(self.plan.iteration_of(position))) is not None:
                rollouts = [opened.rollouts.get(key) for key in self.plan.samples(position)]
                if None not in rollouts:
                    complete[position] = [rollout for rollout in rollouts if rollout is not None]
        return complete

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
                    dispatch.tell(happened.RolloutEvicted(*key, "its stage was cancelled"))
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
            while self._running < slots and (admitted := self._begin()) is not None:
                admission, opened = admitted
                key = (admission.position, admission.sample)
                self._running += 1
                opened.running[key] = group.create_task(
                    self._roll_out(admission, opened), name=f"rollout {key}", context=opened.context.copy()
                )
            await change.wait()

    def _begin(self) -> tuple[Continue, OpenCollection] | None:
        with self._dispatch as dispatch:
            if (admitted := self._admitted()) is not None:
                admission, _ = admitted
                dispatch.tell(happened.RolloutStarted(admission.position, admission.sample, admission.attempt, ENGINE))
        return admitted

    async def _roll_out(self, given: Continue, opened: OpenCollection) -> None:
        key = (given.position, given.sample)
        try:
            # A rollout that was admitted during a transfer begins on the new weights
            while (version := self._dispatch.controller.replicas[ENGINE].version) is None or version < given.version:
                change = self._change
                if self._dispatch.controller.replicas[ENGINE].version == version:
                    await change.wait()
            began = time.monotonic()
            rollout = await opened.collection.roll_out(self.plan.spec(key), policy_version=given.version)
            opened.spans[key] = began, time.monotonic()
            with self._dispatch as dispatch:
                if self._open.get(opened.iteration) is opened and dispatch.is_running(key, given.attempt):
                    rollout = opened.attempt.add(rollout)
                    opened.rollouts[key] = rollout
                    announce("rollout", tokens=rollout.generated_tokens, reward=rollout.counted_reward)
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
    """Start an attempt at a stage in the way that `rollout.distribution` selects.

    Args:
        policy_version: the collected version.
        oldest_version: also accept calls of versions from this one on.
    """
    if run.config.rollout.distribution.workers is None:
        return Parts(run.begin(stage, policy_version=policy_version), policy_version, oldest_version)
    from roundhouse.collection.sharded_attempt import ShardedAttempt

    return ShardedAttempt(run, stage, policy_version, oldest_version)


def runner_of(
    config: RunConfig, plan: PlannedRollouts, dispatch: Dispatch, engine_url: str, **options: Any
) -> RolloutRunner[Any, Any]:
    """The runner that `rollout.distribution` names; options as of `RolloutRunner`."""
    if config.rollout.distribution.workers is None:
        return InProcessRunner(config, plan, dispatch, engine_url, **options)
    from roundhouse.collection.shard_runner import ShardRunner

    return ShardRunner(config, plan, dispatch, engine_url, **options)


def planned(specs: Sequence[RolloutSpec], version: int) -> PlannedRollouts:
    """Return a plan with one iteration, trained from `version`, in which each rollout is a group."""
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
    """Collector of one attempt at a stage; see the module's docstring."""

    def __init__(self, config: RunConfig, attempt: CollectAttempt, version: int) -> None:
        """Create the collector for an engine that holds `version`."""
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
        """Collect the missing rollouts of `specs`. Call again for another round. See `RolloutCollection.of` for
        `on_policy`.

        Raises:
            InfraError: a shard lost more workers than `rollout.distribution.restarts`.
            StoreError: finished rollouts cannot be stored.
        """
        version, plan = self._version, planned(specs, self._version)
        dispatch, earlier = Dispatch(Controller(plan.bound)), self._attempt.finished(specs)
        keys = zip(plan.keys(version + 1), specs, strict=True)
        finished = tuple((*key, version) for key, spec in keys if spec.rollout_id in earlier)
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
    """End a runner, which stores finished rollouts. Ignore a second interruption."""
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
    """Rollouts that are made together and share an outage detector and a retry budget.

    `Outage` opens when `threshold` rollouts in a row, each after all its attempts, failed for infrastructure; any other
    outcome resets the count. An open outage stays open. Without it, a collection of 10,000 rollouts would try each
    rollout three times against a dead engine. `RetryBudget` bounds retries during partial failures: if one rollout in
    three fails, three attempts each would hide the failure and cost half as much again.
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
        """Create the collection for `roll_out` of each of `specs`, in any order.

        Args:
            on_policy: the rollouts are trained on, so a row with sampling other than `sampling` fails.
            policy_version: version that the engine holds, for agents that do not report one.
            journal: finished model calls of earlier attempts, and the record of new ones. Retries after an
                infrastructure failure resume after them. Without a journal, each attempt starts from its first call.
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
            if rollout.failure_code == RESTARTED:
                continue  # another rollout's code ended the process of both, and that rollout's attempts are counted
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
"""Smallest threshold: a few rollouts fail for unrelated reasons, even when they run one at a time."""


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
        """Return whether one more retry is allowed at this time, in seconds of a monotonic clock."""
        first_at = now if self._first_at is None else self._first_at
        if self._left < 1 or (self._seconds is not None and now - first_at > self._seconds):
            return False
        self._first_at, self._left = first_at, self._left - 1
        return True
