"""Interface between the stages that collect and the two runners that play the rollouts of a plan.

Invariants: a rollout starts only if the controller admits it and its iteration is open. Its outcome is stored before
the controller's journal records it. After the runner has ended for any reason, all its work has stopped and finished
rollouts are stored.

    open(1) ──┐                        ┌── rollouts of collect 1 ──> settle, commit
    open(2) ──┼── admission ── slots ──┼── rollouts of collect 2
              │   (oldest first)       └── …

One thread admits rollouts: it starts them itself (`InProcessRunner`) or gives whole shards to workers (`ShardRunner`).

`Dispatch` shares the controller between threads: it applies and journals events and wakes waiting threads. Events are
written in the order of their application, also after failed writes. `record` returns when every earlier event is
stored. Decisions are made and recorded under one lock, so that two threads never act on the same one.

    with dispatch:                                 from any thread
        answer = dispatch.controller.admission(…)
        dispatch.tell(RolloutStarted(…))
    dispatch.record()
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from roundhouse.activity import ACTIVITY, Supervision
from roundhouse.collection import controller as happened
from roundhouse.collection.collector import Progress
from roundhouse.collection.controller import Continue, Controller, Event
from roundhouse.collection.pool import Key, PlannedRollouts
from roundhouse.config.models import RunConfig, Sampling
from roundhouse.cpu import attribute_to_this_stage
from roundhouse.errors import InfraError
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.stage import Reference
from roundhouse.trajectories.records import Rollout, Status

ENGINE = "engine"
"""Name of the controller's only replica: the run's engine, which replaces all its weights at once and shares requests
among its replicas. It holds a version when all of them confirm it."""


class EventJournal(Protocol):
    """Where events are written down (`asynchronous.controller_journal`)."""

    @property
    def segments(self) -> int: ...

    def append(self, events: Sequence[Event]) -> None:
        """After an error, only the same events can be appended next: they may be in the store all the same."""

    def keep_state(self, controller: Controller) -> None: ...


class Dispatch:
    """The controller, shared by threads. Without a journal, the stored rollouts are enough to resume."""

    def __init__(self, controller: Controller, journal: EventJournal | None = None) -> None:
        self.controller = controller
        self._journal = journal
        self._changed = threading.Condition(threading.RLock())
        self._recording = threading.Lock()
        self._waiting: list[Event] = []
        self._unwritten: list[list[Event]] = []
        """Events to append to the journal, oldest first."""
        self._listeners: list[Callable[[], None]] = []

    def __enter__(self) -> Dispatch:
        self._changed.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changed.release()

    def tell(self, *events: Event) -> None:
        """Let the controller take in events, and wake the waiting loops.

        Raises:
            DataError: an event cannot have happened (`Controller.apply`).
        """
        with self._changed:
            for event in events:
                self.controller.apply(event)
                self._waiting.append(event)
        self.wake()

    def wake(self) -> None:
        """Wake all waiting threads, though the controller's state is the same."""
        with self._changed:
            self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this after each change, from whichever thread made it."""
        self._listeners.append(listener)

    def wait(self, seconds: float) -> None:
        """Wait for a change, at most so long. The caller holds the lock, which is released during the wait."""
        self._changed.wait(seconds)

    def record(self, keep_state: bool = False) -> None:
        """Write the events down.

        Raises:
            StoreError: another controller of this run has written; this one must stop.
        """
        with self._recording:
            with self._changed:
                waiting, self._waiting = self._waiting, []
                if self._journal is None:
                    return
                self._unwritten.append(waiting)
            while self._unwritten:
                self._journal.append(self._unwritten[0])
                del self._unwritten[0]
            if keep_state:
                with self._changed:
                    if not self._waiting:  # else the next time: a state is only a shorter way
                        self._journal.keep_state(self.controller)

    @property
    def segments(self) -> int:
        """Number of journal writes."""
        return 0 if self._journal is None else self._journal.segments

    @property
    def is_journalled(self) -> bool:
        """Return whether the controller's events are journalled for a later process."""
        return self._journal is not None

    def is_running(self, key: Key, attempt: int) -> bool:
        """Return whether this attempt is still wanted."""
        pool = self.controller.pool
        return key in pool.running and pool.attempt_of(key) == attempt

    @property
    def works_elsewhere(self) -> bool:
        """Return whether a step, a transfer or an evaluation is in progress that a rollout may have to wait for."""
        controller = self.controller
        incoming = any(place.incoming is not None for place in controller.replicas.values())
        return controller.in_training or controller.evaluating is not None or incoming


def oldest_version(rollout: Rollout) -> int:
    """Oldest version among its tokens."""
    return min(turn.policy_version for turn in rollout.turns)


def finished_rollouts(keyed: Mapping[Key, Rollout], tokenless: int | None = None) -> list[tuple[int, int, int]]:
    """Return finished rollouts as events name them: (position, sample, oldest version). `tokenless` is the version of
    rollouts without turns; if unset, these are made again."""
    return [
        (*key, oldest_version(rollout) if rollout.turns or tokenless is None else tokenless)
        for key, rollout in keyed.items()
        if rollout.status is not Status.FAILED and (rollout.turns or tokenless is not None)
    ]


def forget(dispatch: Dispatch, keys: Iterable[Key], kept: Collection[Key]) -> None:
    """Schedule rollouts again that have an outcome and are not kept. Groups that were chosen for a step stay."""
    controller = dispatch.controller
    with dispatch:
        for position, sample in keys:
            group = controller.pool.groups.get(position)  # none of a round that closed with a rollout of an earlier one
            if group is None or controller.has_decided(position) or (position, sample) in kept:
                continue
            if sample in group.failed:
                dispatch.tell(happened.RolloutEvicted(position, sample, "failed"))
            elif sample in group.versions:
                dispatch.tell(happened.RolloutEvicted(position, sample, "lost"))


END_SECONDS = 60.0
"""Time for the runner to cancel its rollouts, close their sessions and store finished ones."""
LOOK_SECONDS = 1.0
"""Interval at which a waiting thread checks that the other threads are alive."""


class CollectAttempt(Protocol):
    """One attempt at a collect stage: by this process (`Parts`) or by shards (`ShardedAttempt`)."""

    def finished(self, specs: Sequence[RolloutSpec]) -> Container[str]:
        """Ids of those of these rollouts that earlier attempts may have finished: a runner that opens them looks closer."""
        ...

    def whole(self, rollouts: Sequence[Rollout], groups: Collection[str]) -> list[Rollout]:
        """Return the runner's rollouts of these groups, with texts and token IDs."""
        ...

    def charge(self, cpu_seconds: float) -> None:
        """Count CPU seconds of threads that worked for it (`roundhouse.cpu`)."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics about interrupted rollouts and shards."""
        ...

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        """Make the stage complete."""
        ...


class OpenIteration(Protocol):
    """An open iteration: its rollouts may start."""

    @property
    def attempt(self) -> CollectAttempt:
        """At the stage that they are written to."""
        ...

    @property
    def iteration(self) -> int: ...

    @property
    def planned(self) -> int:
        """Rollouts of the iteration's rounds that have begun."""
        ...

    @property
    def complete(self) -> bool:
        """Return whether each rollout has its outcome."""
        ...

    @property
    def window_seconds(self) -> float:
        """Seconds from the first start to the last end of this attempt's rollouts."""
        ...

    def made(self) -> list[Rollout]:
        """The rollouts that have an outcome so far, in the plan's order."""
        ...

    def settle(self) -> list[Rollout]:
        """Return the rollouts to commit, in plan order. Called once, after the iteration is closed."""
        ...


O = TypeVar("O", bound=OpenIteration)  # noqa: E741
A = TypeVar("A", bound=CollectAttempt)


class RolloutRunner(ABC, Generic[O, A]):
    """See the module's docstring. `open`, `wait` and `close` are called from the thread of the iteration's stage."""

    def __init__(
        self,
        config: RunConfig,
        plan: PlannedRollouts,
        dispatch: Dispatch,
        engine_url: str,
        *,
        sampling: Sampling | None = None,
        on_policy: bool = True,
    ) -> None:
        """`sampling`: unset, the run's own. `on_policy`: they are to be trained on."""
        self.config = config
        self.plan = plan
        self.sampling = config.generation.sampling if sampling is None else sampling
        self.on_policy = on_policy
        self.url = engine_url
        self.error: BaseException | None = None
        """Exception that ended the runner."""
        self.ended = threading.Event()
        self.wanted: int | None = None
        """An iteration that is to be opened, because its first rollout may begin."""
        self._dispatch = dispatch
        self._open: dict[int, O] = {}
        self._stopped = threading.Event()
        self._ending_seconds = 0.0
        """Time that workers outside this process need to end."""
        self._began_cpu = self._cpu_seconds = self._spent_seconds = 0.0
        self._supervision: Supervision[None] | None = None
        """Supervision of the runner's thread, which does other work afterwards: environments may start programs that
        end with it."""

    def start(self) -> None:
        self._supervision = Supervision(self._carry_out)
        self._supervision.start()

    def stop(self) -> None:
        """End the runner: cancel its rollouts and store finished ones.

        Raises:
            InfraError: it does not end.
        """
        self._stopped.set()
        self._interrupt()
        self._dispatch.wake()
        limit = END_SECONDS + self._ending_seconds
        if self._supervision is not None and not self._supervision.done.wait(limit):
            raise InfraError(f"The rollout runner has not ended within {limit:g} s.")

    @abstractmethod
    def open(self, iteration: int, attempt: A, progress: Progress | None = None) -> O:
        """Let an iteration's rollouts start in an attempt at its stage. Keep finished rollouts of earlier attempts that
        the controller counts.

        Raises:
            InfraError: the runner has ended, or its workers' service does not answer.
        """

    def begin_round(self, opened: O, number: int) -> None:
        """Let the rollouts of a round start (`rollout.dynamic_sampling`) when the earlier rounds are complete. Do
        nothing for the first round or a round that had begun when the iteration was opened.

        Raises:
            InfraError: see `open`.
        """
        if number > self._dispatch.controller.pool.rounds_of(opened.iteration):
            self._begin_round(opened, number)

    def end_rounds(self, opened: O, rounds: int) -> None:
        """After so many rounds, the iteration draws no further one: it can be trained on."""
        with self._dispatch as dispatch:
            if dispatch.controller.pool.awaits_round(opened.iteration):
                dispatch.tell(happened.RoundsEnded(opened.iteration, rounds))

    def wait(self, opened: O) -> bool:
        """Wait until all rollouts of its rounds have an outcome; with a window, until steps were decided on for all of its
        groups. False when the runner ends before.

        Raises:
            Exception: why this attempt cannot be completed.
        """
        while True:
            with self._dispatch as dispatch:
                self._refuse_failed(opened)
                controller = dispatch.controller
                if controller.terms.chooses:
                    whole = all(controller.has_decided(position) for position in self.plan.groups(opened.iteration))
                else:
                    whole = opened.complete
                if whole or self.ended.is_set():  # and has stored finished rollouts
                    break
                waits_for_others = not self._stopped.is_set() and not self._is_at_work(opened)
                dispatch.wait(LOOK_SECONDS)
            self._report_progress(opened)
            if waits_for_others:
                # The thread waits for a step, weights or older rollouts, which have separate watchdogs, or for a
                # person between two iterations.
                # Training notices a complete standstill while it waits (`Overlap.collected`).
                ACTIVITY.advance()
        self._report_progress(opened)
        return whole

    @abstractmethod
    def close(self, iteration: int) -> None:
        """Start no further rollout of an iteration, and cancel the running ones to be scheduled again."""

    def outlines(self, positions: Collection[int]) -> list[Rollout]:
        """Return this runner's rollouts of these groups, perhaps without tokens."""
        return [
            rollout
            for opened in self._open.values()
            for key, rollout in self.plan.keyed(opened.iteration, opened.made()).items()
            if key[0] in positions
        ]

    @abstractmethod
    def at_hand(self, positions: Iterable[int]) -> dict[int, list[Rollout]]:
        """Return the groups with all rollouts in this process."""

    @abstractmethod
    def window_seconds(self, positions: Collection[int]) -> float:
        """Seconds from the first start to the last end of this runner's rollouts of these groups."""

    @abstractmethod
    def flush(self) -> None:
        """Store finished rollouts, then the controller's events.

        Raises:
            InfraError: the runner does not answer.
        """

    def spend(self) -> float:
        """CPU seconds of the runner's thread that no earlier call returned."""
        with self._dispatch:
            spent, self._spent_seconds = self._cpu_seconds - self._spent_seconds, self._cpu_seconds
        return spent

    def _carry_out(self) -> None:
        self._began_cpu = time.thread_time()
        with attribute_to_this_stage():
            self._run()

    def _count_cpu(self) -> None:
        """In the runner's thread."""
        self._cpu_seconds = time.thread_time() - self._began_cpu

    @abstractmethod
    def _run(self) -> None:
        """The runner's thread. Last, it sets `ended` and wakes all that wait."""

    @abstractmethod
    def _begin_round(self, opened: O, number: int) -> None:
        """Let the rollouts of a further round begin; what earlier attempts finished of it is kept."""

    @abstractmethod
    def _is_at_work(self, opened: O) -> bool: ...

    def _interrupt(self) -> None:
        """Wake the runner's thread if it waits for something other than the dispatch."""

    def _refuse_failed(self, opened: O) -> None:
        """Raise why this attempt cannot be completed."""

    def _report_progress(self, opened: O) -> None:
        """Report the progress unless something else does."""

    def _register(self, opened: O) -> O:
        """Its rollouts may begin."""
        with self._dispatch as dispatch:
            self._open[opened.iteration] = opened
            self.wanted = None
            dispatch.wake()
        return opened

    def _admitted(self) -> tuple[Continue, O] | None:
        """Return the next admitted rollout with its open iteration. If the iteration is not open, `wanted` requests it.
        The caller holds the dispatch."""
        admission = self._dispatch.controller.admission(ENGINE)
        if not isinstance(admission, Continue):
            return None
        iteration = self.plan.iteration_of(admission.position)
        if (opened := self._open.get(iteration)) is not None:
            return admission, opened
        if self.wanted != iteration:
            self.wanted = iteration
            self._dispatch.wake()
        return None

    def _refuse_ended(self) -> None:
        if self.ended.is_set():
            raise self.error or InfraError("The rollout runner has ended.")


def window_of(spans: Collection[tuple[float, float]]) -> float:
    """From the first begin to the last end."""
    return max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
