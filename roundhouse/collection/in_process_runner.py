"""The generation loop: one thread that rolls out whatever the controller admits, for all open collections at once.

Invariants: a rollout begins only when the controller says so and its iteration's collection is open; its outcome is in the
parts of that collection before the controller's journal says that it finished; when the loop ends, however it ends, nothing of
it runs any more and what had finished is on disk.

    open(1) ──┐                       ┌── parts of collect 1 ──> complete
    open(2) ──┼── admission ── slots ─┼── parts of collect 2
              │   (oldest first)      └── …
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from roundhouse.collection import events as happened
from roundhouse.collection import parts as stage_parts
from roundhouse.collection.decisions import Continue
from roundhouse.collection.dispatch import ENGINE, Dispatch
from roundhouse.collection.parts import Parts
from roundhouse.collection.plan import Plan
from roundhouse.collection.resumption import forget
from roundhouse.collection.rollouts import Key
from roundhouse.config.models import RunConfig
from roundhouse.errors import InfraError
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.health.activity import ACTIVITY
from roundhouse.progress import announce
from roundhouse.rollout import collector
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.store.cpu_accounting import attribute_to_this_stage
from roundhouse.trajectories.records import Rollout, Status

END_SECONDS = 60.0
"""For the loop to cancel its rollouts, close their sessions, and write down what had finished."""
FLUSH_PATIENCE_SECONDS = 300.0
LOOK_SECONDS = 1.0
"""How often who waits looks whether the others are still there."""

Progress = Callable[[int, int], None]


@dataclass
class OpenCollection:
    """An iteration whose rollouts may begin."""

    iteration: int
    parts: Parts
    planned: int
    collection: collector.RolloutCollection
    context: contextvars.Context
    """Of its stage, so that its rollouts are signs of life of this stage."""
    progress: Progress | None
    rollouts: dict[Key, Rollout] = field(default_factory=dict)
    running: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    spans: dict[Key, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of what finished in this attempt, of one clock."""

    @property
    def complete(self) -> bool:
        return len(self.rollouts) == self.planned

    @property
    def window_seconds(self) -> float:
        """From its first rollout's begin to its last one's end, in this attempt."""
        return window_of(self.spans.values())


class InProcessRunner:
    """See the module's docstring."""

    def __init__(self, config: RunConfig, plan: Plan, dispatch: Dispatch, engine_url: str) -> None:
        self.plan = plan
        self.url = engine_url
        self.error: BaseException | None = None
        """What ended the loop."""
        self.ended = threading.Event()
        self.wanted: int | None = None
        """An iteration whose collection is to be opened, because its first rollout may begin."""
        self._config = config
        self._dispatch = dispatch
        self._open: dict[int, OpenCollection] = {}
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._running = 0
        self._cpu_seconds = self._spent_seconds = 0.0
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="generation loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop: rollouts are cancelled, what finished is written down.

        Raises:
            InfraError: it does not end.
        """
        self._stopped.set()
        if self._ready.is_set():
            self._call_soon(self._main.cancel)
        self._dispatch.wake()
        if self._thread.is_alive():
            self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            raise InfraError(f"The generation loop has not ended within {END_SECONDS:g} s.")

    # From the stage's thread

    def open(self, iteration: int, parts: Parts, progress: Progress | None = None) -> OpenCollection:
        """Let an iteration's rollouts begin; those that earlier attempts finished are kept."""
        self._wait_until_ready()
        specs = self.plan.specs(iteration)
        keys = dict(zip(self.plan.keys(iteration), specs, strict=True))
        collection = collector.RolloutCollection.of(
            specs,
            self._policy,
            self._environment,
            self._config.rollout,
            self._config.generation.sampling,
            journal=parts.journal,
        )
        context = contextvars.copy_context()
        opened = OpenCollection(iteration, parts, len(specs), collection, context, progress)
        with self._dispatch as dispatch:
            rollouts = dispatch.controller.rollouts
            counted = [key for key in keys if rollouts.has_left(key[0]) or key in rollouts]
            kept = parts.keep([keys[key] for key in counted])
            opened.rollouts = {key: kept[keys[key].rollout_id] for key in counted if keys[key].rollout_id in kept}
            forget(dispatch.controller, dispatch, self.plan, iteration, set(opened.rollouts))
            self._open[iteration] = opened
            self.wanted = None
            dispatch.wake()
        return opened

    def wait(self, opened: OpenCollection) -> bool:
        """Wait until all of its rollouts have an outcome; with a window, until steps were decided on for all of its groups.
        False when the loop ends before."""
        while True:
            with self._dispatch as dispatch:
                if self._is_whole(opened):
                    return True
                if self.ended.is_set():  # and has written down what had finished
                    return False
                waits_for_others = not opened.running and not self._stopped.is_set()
                dispatch.wait(LOOK_SECONDS)
            if waits_for_others:
                # For a step, weights, older rollouts, each with a watchdog of its own; or for a person between two iterations.
                # That nobody works at all is noticed by training, while it waits (`Overlap.collected`).
                ACTIVITY.advance()

    def at_hand(self, positions: Iterable[int]) -> dict[int, list[Rollout]]:
        """Those of these groups of which all rollouts were made, or read, since the loop began."""
        found = {}
        for position in positions:
            if (opened := self._open.get(self.plan.iteration_of(position))) is not None:
                rollouts = [opened.rollouts.get(key) for key in self.plan.samples(position)]
                if None not in rollouts:
                    found[position] = [rollout for rollout in rollouts if rollout is not None]
        return found

    def outlines(self, positions: Collection[int]) -> list[Rollout]:
        """What was made of these groups since the loop began."""
        return [rollout for rollouts in self.at_hand(positions).values() for rollout in rollouts]

    def window_seconds(self, positions: Collection[int]) -> float:
        """From the first begin to the last end of what was made of these groups since the loop began."""
        spans = [span for opened in self._open.values() for key, span in opened.spans.items() if key[0] in positions]
        return window_of(spans)

    def flush(self) -> None:
        """Write down what finished, then the controller's events.

        Raises:
            InfraError: the loop does not answer.
        """
        if not self._ready.is_set() or self.ended.is_set():
            self._dispatch.record()
            return
        flushed = asyncio.run_coroutine_threadsafe(self._flush(), self._loop)
        try:
            flushed.result(FLUSH_PATIENCE_SECONDS)
        except TimeoutError as error:
            raise InfraError(
                f"The generation loop has written nothing down for {FLUSH_PATIENCE_SECONDS:g} s."
            ) from error

    def spend(self) -> float:
        """CPU seconds of the loop's thread up to the newest flush that were not told of before."""
        with self._dispatch:
            spent, self._spent_seconds = self._cpu_seconds - self._spent_seconds, self._cpu_seconds
        return spent

    def close(self, iteration: int) -> None:
        """Let no further rollout of an iteration begin; what runs is given up, to be begun again."""
        with self._dispatch as dispatch:
            opened = self._open.pop(iteration, None)
            if opened is None:
                return
            for key, task in list(opened.running.items()):
                if key in dispatch.controller.rollouts.running:
                    dispatch.tell(happened.RolloutEvicted(*key, "its stage was given up"))
                self._call_soon(task.cancel)

    def _is_whole(self, opened: OpenCollection) -> bool:
        controller = self._dispatch.controller
        if controller.terms.chooses:
            return all(controller.has_decided(position) for position in self.plan.groups(opened.iteration))
        return opened.complete

    def _wait_until_ready(self) -> None:
        while not self._ready.wait(LOOK_SECONDS):
            if self.ended.is_set():
                raise self.error or InfraError("The generation loop has ended.")

    # In the loop's thread

    def _run(self) -> None:
        try:
            with attribute_to_this_stage():
                asyncio.run(self._work())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the loop is driven from
            self.error = error
        finally:
            self.ended.set()
            self._dispatch.wake()

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._change = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        self._dispatch.listen(self._look_again)
        environment = open_environment(self._config.environment)
        try:
            async with HttpPolicyClient(self.url, self._config.generation) as policy, environment:
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
        finally:
            await self._flush()

    async def _admit(self, group: asyncio.TaskGroup) -> None:
        slots = self._config.rollout.concurrency or math.inf
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
            given = dispatch.controller.admission(ENGINE)
            if not isinstance(given, Continue):
                return None
            iteration = self.plan.iteration_of(given.position)
            if (opened := self._open.get(iteration)) is None:
                if self.wanted != iteration:
                    self.wanted = iteration
                    dispatch.wake()
                return None
            dispatch.tell(happened.RolloutStarted(given.position, given.sample, given.attempt, ENGINE))
        return given, opened

    async def _roll_out(self, given: Continue, opened: OpenCollection) -> None:
        key = (given.position, given.sample)
        try:
            await self._held(given.version)
            began = time.monotonic()
            rollout = await opened.collection.roll_out(self.plan.spec(key), policy_version=given.version)
            opened.spans[key] = began, time.monotonic()
            with self._dispatch as dispatch:
                if self._open.get(opened.iteration) is opened and dispatch.is_running(key, given.attempt):
                    self._take(rollout, key, given, opened)
        finally:
            opened.running.pop(key, None)
            self._running -= 1
            self._look_again()

    def _take(self, rollout: Rollout, key: Key, given: Continue, opened: OpenCollection) -> None:
        opened.parts.add(rollout)
        opened.rollouts[key] = rollout
        announce("rollout", tokens=sum(len(turn.generation_token_ids) for turn in rollout.turns), reward=rollout.reward)
        if rollout.status is Status.FAILED:
            self._dispatch.tell(
                happened.RolloutFailed(*key, given.attempt, rollout.failure_code or "failed", final=True)
            )
        else:
            self._dispatch.tell(happened.RolloutFinished(*key, given.attempt))
        if opened.progress is not None:
            opened.progress(len(opened.rollouts), opened.planned)

    async def _held(self, version: int) -> None:
        """Wait for the weights that a rollout is to begin on, where it was admitted while they were on their way."""
        while (held := self._dispatch.controller.replicas[ENGINE].version) is None or held < version:
            change = self._change
            if self._dispatch.controller.replicas[ENGINE].version == held:
                await change.wait()

    async def _flush(self) -> None:
        for opened in list(self._open.values()):
            opened.parts.flush()
        self._dispatch.record()
        self._cpu_seconds = time.thread_time()

    async def _flush_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(max(stage_parts.FLUSH_SECONDS, stage_parts.SHORTEST_SECONDS))
            await self._flush()

    def _look_again(self) -> None:
        self._call_soon(self._on_change)

    def _on_change(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _call_soon(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has ended, and its event loop with it
            self.ended.set()


def window_of(spans: Collection[tuple[float, float]]) -> float:
    """From the first begin to the last end."""
    return max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
