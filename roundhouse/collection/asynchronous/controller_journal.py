"""The controller's events and state in the store.

    events-00000001.jsonl events-00000002.jsonl …   what happened, a segment each time it is written down
    state-00000002.json                              the state after segment 2, so that a start need not replay everything

Invariants: a segment is created once and never changed, so of two controllers of one run that both write, one wins and the
other learns of it; a state is a shorter way to what the segments say; what was appended before a crash is there after it.

Segments go some time after two states have taken their place, so that a long run has no more of them than a short one. What
has gone is not written again: there is a state of a later number.

A run that begins or resumes gets its controller from the store (`resume`): from its journal, and from what the store holds that
the journal does not say. Whatever was killed when, it agrees with the store: its version is the newest checkpoint's, a rollout
counts as finished exactly when it is on disk with its turns (in a committed collect stage also as failed), and nothing runs.
With a window the rollouts lie in generate stages, each committed when steps were decided on for all of its groups: the journal
says so before, and nothing of it is open any more.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.plan import Plan, bound_of, generated_in
from roundhouse.collection.collector import written_rollouts
from roundhouse.collection.controller import ControlledReplica, Controller, Event, event_from_json, event_to_json
from roundhouse.collection.pool import Group, RunningRollout, StalenessBound
from roundhouse.collection.runner import ENGINE, Dispatch, finished_rollouts, forget
from roundhouse.errors import DataError, StoreError
from roundhouse.store.location import AlreadyExists, Location
from roundhouse.store.run import Run, skip_of

_SEGMENT = re.compile(r"events-(\d{8})\.jsonl")
_STATE = re.compile(r"state-(\d{8})\.json")
KEPT_STATES = 2
KEPT_SEGMENTS = 200
"""Segments before the oldest kept state, for inspection by a person: a quarter of an hour, at one in five seconds."""


class ControllerJournal:
    """The journal at a place in the store."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._written = max([*self._numbers(_SEGMENT), *self._numbers(_STATE)], default=0)
        self._begun: bytes | None = None
        """The next segment, where an error left open whether it was created."""

    @property
    def segments(self) -> int:
        """How many were written, those that are gone included."""
        return self._written

    def append(self, events: Sequence[Event]) -> None:
        """Write down what happened, in order, before anything is done about it. After an error, append the same events next.

        Raises:
            StoreError: another controller of this run has written since; this one must stop.
        """
        if not events:
            return
        data = "".join(f"{event_to_json(event)}\n" for event in events).encode()
        number, begun = self._written + 1, self._begun
        self._begun = data
        try:
            self.place.create(_segment(number), data)
        except AlreadyExists:
            if data != begun or data != self.place.read(_segment(number)):
                self._begun = None
                raise self._other_controller(number) from None
        if any(state >= number for state in self._numbers(_STATE)):  # it was there, and is gone
            self.place.delete(_segment(number))
            raise self._other_controller(number)
        self._written, self._begun = number, None

    def keep_state(self, controller: Controller) -> None:
        """Keep the state that the segments so far have led to, and no more than the newest few of either."""
        self.place.write(_state(self._written), snapshot(controller).model_dump_json().encode())
        states = sorted(self._numbers(_STATE))
        for number in states[:-KEPT_STATES]:
            self.place.delete(_state(number))
        if len(states) < KEPT_STATES:
            return
        for number in self._numbers(_SEGMENT):
            if number <= states[-KEPT_STATES] - KEPT_SEGMENTS:
                self.place.delete(_segment(number))

    def load(self, terms: StalenessBound, replicas: Iterable[str]) -> Controller:
        """The controller after everything that was written down.

        Raises:
            DataError: segments are missing or damaged, or the terms are narrower than those that the run began with.
        """
        for number in sorted(self._numbers(_STATE), reverse=True):
            try:
                state = state_from_json(self.place.read(_state(number)))
            except DataError:
                continue  # the segments say the same
            controller = restore(terms, state)
            break
        else:
            number, controller = 0, Controller(terms, replicas)
        needed = range(number + 1, self._written + 1)
        if missing := sorted(set(needed) - set(self._numbers(_SEGMENT))):
            raise DataError(
                f"{self.place.uri}/{_segment(missing[0])} is missing, and no state that can be read comes after it. Restore "
                "it, or a state."
            )
        for event in self._events(needed):
            controller.apply(event)
        return controller

    def events(self) -> Iterator[Event]:
        """What happened, as far back as there are segments."""
        return self._events(sorted(self._numbers(_SEGMENT)))

    def _events(self, numbers: Iterable[int]) -> Iterator[Event]:
        for number in numbers:
            for line in self.place.read(_segment(number)).decode().splitlines():
                yield event_from_json(line)

    def _other_controller(self, number: int) -> StoreError:
        return StoreError(
            f"{self.place.uri}/{_segment(number)} was written by another controller of this run. Let one of the two go on; "
            "start this one again when the other has ended."
        )

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        return [int(match[1]) for name in self.place.names() if (match := pattern.fullmatch(name)) is not None]


def _segment(number: int) -> str:
    return f"events-{number:08d}.jsonl"


def _state(number: int) -> str:
    return f"state-{number:08d}.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GroupState(_Part):
    position: int
    versions: list[tuple[int, int]]
    """(sample, oldest version) of what finished."""
    failed: list[int]


class RunningState(_Part):
    position: int
    sample: int
    replica: str
    version: int


class ReplicaState(_Part):
    name: str
    version: int | None
    incoming: int | None


class ControllerState(_Part):
    """Everything that a controller remembers, in an order that does not depend on how it came about."""

    schema_version: Literal[1] = 1
    groups_an_iteration: int
    group_size: int
    rounds_an_iteration: int = 1
    start_lag: int
    """How early what is in here may have begun."""
    version: int
    batch: list[int] | None
    in_training: bool
    evaluated: int
    evaluating: int | None
    cursor: int
    again: list[tuple[int, int]]
    attempts: list[tuple[int, int, int]]
    head: int
    trained_ahead: list[int]
    rounds: list[tuple[int, int]] = []
    """(iteration, rounds begun)."""
    ended: list[int] = []
    """Iterations that draw no further round."""
    groups: list[GroupState]
    running: list[RunningState]
    replicas: list[ReplicaState]


def snapshot(controller: Controller) -> ControllerState:
    """The state as it is now."""
    pool = controller.pool
    return ControllerState(
        groups_an_iteration=controller.terms.groups,
        group_size=controller.terms.group_size,
        rounds_an_iteration=controller.terms.rounds,
        start_lag=controller.terms.start_lag,
        version=controller.version,
        batch=None if controller.batch is None else list(controller.batch),
        in_training=controller.in_training,
        evaluated=controller.evaluated,
        evaluating=controller.evaluating,
        cursor=pool.cursor,
        again=sorted(pool.again),
        attempts=sorted((*key, count) for key, count in pool.attempts.items()),
        head=pool.head,
        trained_ahead=sorted(pool.trained_ahead),
        rounds=sorted(pool.rounds.items()),
        ended=sorted(pool.ended),
        groups=[
            GroupState(position=position, versions=sorted(group.versions.items()), failed=sorted(group.failed))
            for position, group in sorted(pool.groups.items())
        ],
        running=[
            RunningState(position=key[0], sample=key[1], replica=running.replica, version=running.version)
            for key, running in sorted(pool.running.items())
        ],
        replicas=[
            ReplicaState(name=name, version=place.version, incoming=place.incoming)
            for name, place in sorted(controller.replicas.items())
        ],
    )


def restore(terms: StalenessBound, state: ControllerState) -> Controller:
    """A controller in this state; the terms may have become wider, not narrower.

    Raises:
        DataError: the terms are of another plan, or their bound could be broken by what has begun.
    """
    if (terms.groups, terms.group_size) != (state.groups_an_iteration, state.group_size):
        raise DataError(
            f"The controller's state is of {state.groups_an_iteration} groups of {state.group_size} an iteration, not of "
            f"{terms.groups} groups of {terms.group_size}. Take the change back, or start a new run."
        )
    if terms.rounds != state.rounds_an_iteration:
        raise DataError(
            f"The controller's state is of {state.rounds_an_iteration} rounds an iteration at most, not of {terms.rounds} "
            "(rollout.dynamic_sampling.max_rounds). Take the change back, or start a new run."
        )
    if terms.start_lag < state.start_lag:
        raise DataError(
            f"Rollouts have begun up to {state.start_lag} versions early, and asynchrony.staleness "
            f"{terms.asynchrony.staleness} with window {terms.asynchrony.window} allows {terms.start_lag}. Keep the bound that "
            "the run began with, or raise it."
        )
    controller = Controller(terms)
    controller.replicas = {place.name: ControlledReplica(place.version, place.incoming) for place in state.replicas}
    controller.version, controller.evaluated, controller.evaluating = state.version, state.evaluated, state.evaluating
    controller.batch = None if state.batch is None else tuple(state.batch)
    controller.in_training = state.in_training
    pool = controller.pool
    pool.cursor, pool.head, pool.trained_ahead = state.cursor, state.head, set(state.trained_ahead)
    pool.rounds, pool.ended = dict(state.rounds), set(state.ended)
    pool.again = list(state.again)
    heapq.heapify(pool.again)
    pool.attempts = {(position, sample): count for position, sample, count in state.attempts}
    for group in state.groups:
        pool.groups[group.position] = Group(dict(group.versions), set(group.failed))
        if len(group.versions) + len(group.failed) == terms.group_size:
            pool.complete.add(group.position)
            iteration = terms.iteration_of(group.position)
            pool.complete_of[iteration] = pool.complete_of.get(iteration, 0) + 1
    for item in state.running:
        pool.running[(item.position, item.sample)] = RunningRollout(item.replica, item.version)
        controller.replicas[item.replica].running.add((item.position, item.sample))
    return controller


def state_from_json(text: str | bytes) -> ControllerState:
    """A state that was kept.

    Raises:
        DataError: it is damaged, or of another version of the schema.
    """
    try:
        return ControllerState.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"The controller's state cannot be read: {error}. Replay its journal instead.") from None


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


def _skip_what_was_skipped(run: Run, dispatch: Dispatch, version: int) -> None:
    while dispatch.controller.version < version:
        skipped = dispatch.controller.version + 1
        if (skip := skip_of(run, skipped)) is None:
            return
        dispatch.tell(happened.IterationSkipped(skipped, skip.code))


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
