"""The controller of a running run, shared by threads: events are applied and journalled, and waiting threads are woken.

Invariants: events are written down in the order in which the controller took them in; `record` returns when every event
before it is in the store; decisions are taken and recorded under one lock, so that no two loops act on the same one.

    with dispatch:                                 from any thread
        answer = dispatch.controller.admission(…)
        dispatch.tell(RolloutStarted(…))
    dispatch.record()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from roundhouse.collection import events as happened
from roundhouse.collection.bound import Key
from roundhouse.collection.controller import Controller
from roundhouse.collection.events import Event
from roundhouse.trajectories.records import Rollout, Status

ENGINE = "engine"
"""The one replica that the controller knows: the run's engine, which takes all of its weights at once and shares requests among
its own replicas. It holds a version when all of these have said so."""


class EventJournal(Protocol):
    """Where events are written down (`asynchronous.controller_journal`)."""

    @property
    def segments(self) -> int: ...

    def append(self, events: Sequence[Event]) -> None: ...

    def keep_state(self, controller: Controller) -> None: ...


class Dispatch:
    """See the module's docstring. Without a journal, what the store holds of the rollouts says all that a resumed run needs."""

    def __init__(self, controller: Controller, journal: EventJournal | None = None) -> None:
        self.controller = controller
        self._journal = journal
        self._changed = threading.Condition(threading.RLock())
        self._recording = threading.Lock()
        self._waiting: list[Event] = []
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
        """Wait for a change, at most so long. Called with the lock held, which is given up meanwhile."""
        self._changed.wait(seconds)

    def record(self, keep_state: bool = False) -> None:
        """Write the events down.

        Raises:
            StoreError: another controller of this run has written; this one must stop.
        """
        with self._recording:
            with self._changed:
                events, self._waiting = self._waiting, []
            if self._journal is None:
                return
            self._journal.append(events)
            if keep_state:
                with self._changed:
                    if not self._waiting:  # else the next time: a state is only a shorter way
                        self._journal.keep_state(self.controller)

    @property
    def segments(self) -> int:
        """How often something was written down."""
        return 0 if self._journal is None else self._journal.segments

    @property
    def is_journalled(self) -> bool:
        """Whether another life of the controller knows what this one was told."""
        return self._journal is not None

    def is_running(self, key: Key, attempt: int) -> bool:
        """Whether this attempt was not given up."""
        pool = self.controller.pool
        return key in pool.running and pool.attempt_of(key) == attempt

    @property
    def works_elsewhere(self) -> bool:
        """Whether other work is under way that a rollout may have to wait for: a step, a transfer, an evaluation."""
        controller = self.controller
        incoming = any(place.incoming is not None for place in controller.replicas.values())
        return controller.in_training or controller.evaluating is not None or incoming


def oldest_version(rollout: Rollout) -> int:
    """Of its tokens."""
    return min(turn.policy_version for turn in rollout.turns)


def finished_rollouts(keyed: Mapping[Key, Rollout], tokenless: int | None = None) -> list[tuple[int, int, int]]:
    """Those that need not be made again, as events have them: (position, sample, oldest version). `tokenless` is the version of
    those without turns; unset, they are made again."""
    return [
        (*key, oldest_version(rollout) if rollout.turns or tokenless is None else tokenless)
        for key, rollout in keyed.items()
        if rollout.status is not Status.FAILED and (rollout.turns or tokenless is not None)
    ]


def forget(dispatch: Dispatch, keys: Iterable[Key], kept: Collection[Key]) -> None:
    """Begin again those of these rollouts that have an outcome and are not among those that are kept. What a step was decided
    on stays."""
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
