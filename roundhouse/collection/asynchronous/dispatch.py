"""The controller of a running run, shared by threads: events are applied and journalled, and waiting threads are woken.

Invariants: events are written down in the order in which the controller took them in; `record` returns when every event
before it is in the store; decisions are taken and recorded under one lock, so that no two loops act on the same one.

    with dispatch:                                 from any thread
        answer = dispatch.controller.admission(…)
        dispatch.tell(RolloutStarted(…))
    dispatch.record()

A run that begins or resumes gets its controller from the store (`resume`): from its journal, and from what the store holds that
the journal does not say. Whatever was killed when, it agrees with the store: its version is the newest checkpoint's, a rollout
counts as finished exactly when it is on disk with its turns (in a committed collect stage also as failed), and nothing runs.
With a window the rollouts lie in generate stages, each committed when steps were decided on for all of its groups: the journal
says so before, and nothing of it is open any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from types import TracebackType

from roundhouse.collection.asynchronous import events as happened
from roundhouse.collection.asynchronous.controller import Controller
from roundhouse.collection.asynchronous.controller_journal import ControllerJournal
from roundhouse.collection.asynchronous.events import Event
from roundhouse.collection.asynchronous.plan import Plan, bound_of, generated_in
from roundhouse.collection.asynchronous.pool import Key
from roundhouse.collection.collector import written_rollouts
from roundhouse.errors import DataError, StoreError
from roundhouse.store.run import Run, skip_of
from roundhouse.trajectories.records import Rollout, Status

ENGINE = "engine"
"""The one replica that the controller knows: the run's engine, which takes all of its weights at once and shares requests among
its own replicas. It holds a version when all of these have said so."""


class Dispatch:
    """See the module's docstring."""

    def __init__(self, controller: Controller, journal: ControllerJournal) -> None:
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
            self._journal.append(events)
            if keep_state:
                with self._changed:
                    if not self._waiting:  # else the next time: a state is only a shorter way
                        self._journal.keep_state(self.controller)

    @property
    def segments(self) -> int:
        """How often something was written down."""
        return self._journal.segments

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


PLACE = "asynchrony"
"""Of the journal, in the run."""


def resume(run: Run, plan: Plan) -> Dispatch:
    """The dispatch of a run that begins or resumes.

    Raises:
        StoreError: the journal and the checkpoints are not of one run.
        DataError: the bound is narrower than that the run began with.
    """
    journal, terms = ControllerJournal(run.location / PLACE), bound_of(run)
    controller = journal.load(terms, ())
    dispatch = Dispatch(controller, journal)
    latest = run.latest_checkpoint()
    newest = run.first_version if latest is None else latest.policy_version
    _skip_what_was_skipped(run, dispatch, newest)
    try:
        finished: list[tuple[int, int, int]] = []
        failed: list[tuple[int, int]] = []
        for iteration in _open_iterations(controller, newest):
            stage = generated_in(run, iteration)
            committed = stage.reference() is not None
            if committed and controller.terms.chooses:
                continue
            keyed = plan.keyed(iteration, written_rollouts(stage.location))
            own = finished_rollouts(keyed)
            finished += own
            if committed:
                failed += sorted(keyed.keys() - {(position, sample) for position, sample, _ in own})
        dispatch.tell(happened.Restarted(newest, tuple(finished), ((ENGINE, None),), tuple(failed)))
    except DataError as error:
        raise StoreError(
            f"{run.location.uri}/{PLACE} does not go with the checkpoints: {error} Where the journal is lost, fork the run: "
            f"--set resume.path={run.checkpoint(newest).location.uri} --set run_id=<name>."
        ) from error
    # What the controller has on record and the store lacks is rolled out again; in an open stage also what had failed
    for iteration in _open_iterations(controller, controller.version):
        stage = generated_in(run, iteration)
        if stage.reference() is not None:
            continue
        own = finished_rollouts(plan.keyed(iteration, written_rollouts(stage.location)))
        rounds = range(1, controller.pool.rounds_of(iteration) + 1)
        keys = chain.from_iterable(plan.keys(iteration, number) for number in rounds)
        forget(dispatch, keys, {(position, sample) for position, sample, _ in own})
    dispatch.record(keep_state=True)
    return dispatch


def catch_up(run: Run, dispatch: Dispatch, version: int) -> None:
    """Tell of iterations up to `version` that were skipped, which the controller did not hear of."""
    with dispatch:
        _skip_what_was_skipped(run, dispatch, version)


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


def _skip_what_was_skipped(run: Run, dispatch: Dispatch, version: int) -> None:
    while dispatch.controller.version < version:
        skipped = dispatch.controller.version + 1
        if (skip := skip_of(run, skipped)) is None:
            return
        dispatch.tell(happened.IterationSkipped(skipped, skip.code))


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


def unfinished_iterations(run: Run, controller: Controller) -> list[int]:
    """Those of which rollouts have begun, and whose stage is not complete; oldest first."""
    terms, pool = controller.terms, controller.pool
    begun = {terms.iteration_of(position) for position in pool.groups}
    if terms.chooses:  # a stage can end after the step that took the last of its groups
        begun |= {terms.iteration_of(position) for position in pool.trained_ahead}
        iteration = terms.iteration_of(pool.head) - 1
        while iteration > run.first_version and generated_in(run, iteration).reference() is None:
            begun.add(iteration)
            iteration -= 1
    return [iteration for iteration in sorted(begun) if generated_in(run, iteration).reference() is None]


def _open_iterations(controller: Controller, version: int) -> range:
    """Those that may have rollouts and have not been trained."""
    terms = controller.terms
    first = terms.iteration_of(controller.pool.head) - 1 if terms.chooses else version
    last = version + 1 + terms.start_lag
    return range(first + 1, min(last, terms.iterations) + 1)
