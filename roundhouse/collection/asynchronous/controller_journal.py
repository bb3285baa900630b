"""The controller's events and state in the store.

    events-00000001.jsonl events-00000002.jsonl …   events, one segment per write
    state-00000002.json                              state after segment 2, so that a start need not replay everything

Invariants: a segment is created once and never changed, so if two controllers of a run write, one wins and the other
gets an error. A state equals the replay of its segments. Appended events survive a crash. A segment is deleted some
time after two newer states exist, so the number of segments does not grow with the run; a deleted segment is never
written again.

`resume` restores a run's controller from the journal and corrects it by the store: its version is that of the newest
checkpoint, a rollout counts as finished exactly if it is stored with its turns (in a committed collect stage also as
failed), and nothing is running. With a window, rollouts are in generate stages; each is committed after steps were
chosen for all its groups, and the journal records that before.
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
    """Journal of one run's controller, at a location in the store."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._written = max([*self._numbers(_SEGMENT), *self._numbers(_STATE)], default=0)
        self._begun: bytes | None = None
        """Content of the next segment after an error that left its creation unknown."""

    @property
    def segments(self) -> int:
        """Number of written segments, including deleted ones."""
        return self._written

    def append(self, events: Sequence[Event]) -> None:
        """Write events in order, before anything acts on them. After an error, append the same events next.

        Raises:
            StoreError: another controller of this run has written in the meantime; this one must stop.
        """
        if not events:
            return
        data = "".join(f"{event_to_json(event)}\n" for event in events).encode()
        number, pending = self._written + 1, self._begun
        self._begun = data
        try:
            self.place.create(_segment(number), data)
        except AlreadyExists:
            if data != pending or data != self.place.read(_segment(number)):
                self._begun = None
                raise self._other_controller(number) from None
        if any(state >= number for state in self._numbers(_STATE)):  # it was there, and is gone
            self.place.delete(_segment(number))
            raise self._other_controller(number)
        self._written, self._begun = number, None

    def keep_state(self, controller: Controller) -> None:
        """Write the state after the present segments. Delete old states and segments that a restart no longer needs."""
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
        """Return the controller after all written events.

        Args:
            terms: the plan and its staleness bound.

        Raises:
            DataError: segments are missing or damaged, or the bound is narrower than at the start of the run.
        """
        for number in sorted(self._numbers(_STATE), reverse=True):
            try:
                state = state_from_json(self.place.read(_state(number)))
            except DataError:
                continue  # the segments hold the same
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
        """Return the events of all remaining segments."""
        return self._events(sorted(self._numbers(_SEGMENT)))

    def _events(self, numbers: Iterable[int]) -> Iterator[Event]:
        for number in numbers:
            for line in self.place.read(_segment(number)).decode().splitlines():
                yield event_from_json(line)

    def _other_controller(self, number: int) -> StoreError:
        return StoreError(
            f"{self.place.uri}/{_segment(number)} was written by another controller of this run. Wait until the other has "
            "ended, then start this one again."
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
    """(sample, oldest version) of finished rollouts."""
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
    """State of a controller; equal controllers give equal JSON, whatever the order of their events."""

    schema_version: Literal[1] = 1
    groups_an_iteration: int
    group_size: int
    rounds_an_iteration: int = 1
    start_lag: int
    """Start lag under which these rollouts may have begun."""
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
    """Return the present state of a controller."""
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
    """Restore a controller in this state. The terms may have a wider bound than before, not a narrower one.

    Raises:
        DataError: the terms belong to another plan, or started rollouts could break their bound.
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
    """Parse a stored state.

    Raises:
        DataError: it is damaged, or of another version of the schema.
    """
    try:
        return ControllerState.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"The controller's state cannot be read: {error}. Replay its journal instead.") from None


PLACE = "asynchrony"
"""Path of the journal in the run."""


def resume(run: Run, plan: Plan) -> Dispatch:
    """Return the dispatch of a run that starts or resumes: its controller and journal, in agreement with the store.

    Raises:
        StoreError: journal and checkpoints belong to different runs.
        DataError: the bound is narrower than at the start of the run.
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
    # Roll out again whatever the controller has on record but the store lacks; in an open stage also failed rollouts
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
    """Add events for skipped iterations up to `version` that the controller missed."""
    with dispatch:
        _skip_what_was_skipped(run, dispatch, version)


def _skip_what_was_skipped(run: Run, dispatch: Dispatch, version: int) -> None:
    while dispatch.controller.version < version:
        skipped = dispatch.controller.version + 1
        if (skip := skip_of(run, skipped)) is None:
            return
        dispatch.tell(happened.IterationSkipped(skipped, skip.code))


def unfinished_iterations(run: Run, controller: Controller) -> list[int]:
    """Return iterations with started rollouts and an incomplete stage, oldest first."""
    terms, pool = controller.terms, controller.pool
    iterations = {terms.iteration_of(position) for position in pool.groups}
    if terms.chooses:  # a stage can end after the step that took the last of its groups
        iterations |= {terms.iteration_of(position) for position in pool.trained_ahead}
        iteration = terms.iteration_of(pool.head) - 1
        while iteration > run.first_version and generated_in(run, iteration).reference() is None:
            iterations.add(iteration)
            iteration -= 1
    return [iteration for iteration in sorted(iterations) if generated_in(run, iteration).reference() is None]


def _open_iterations(controller: Controller, version: int) -> range:
    """Return untrained iterations that may have rollouts."""
    terms = controller.terms
    first = terms.iteration_of(controller.pool.head) - 1 if terms.chooses else version
    last = version + 1 + terms.start_lag
    return range(first + 1, min(last, terms.iterations) + 1)
