"""The runner in this process: one event loop rolls out whatever the controller admits, for all open iterations at once.

Invariant: those of `runner`; what finished is in the parts of its iteration before the journal says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roundhouse.activity import GRACE_SECONDS, Supervision, announce, run_interruptible
from roundhouse.collection import collector as stage_collector
from roundhouse.collection import events as happened
from roundhouse.collection.bound import Key
from roundhouse.collection.collector import Parts
from roundhouse.collection.dispatch import ENGINE, finished_rollouts, forget
from roundhouse.collection.events import Continue
from roundhouse.collection.runner import LOOK_SECONDS, Progress, RolloutRunner, window_of
from roundhouse.errors import InfraError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.rollout import collector
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import EnvironmentClient
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
