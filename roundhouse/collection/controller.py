"""The weight-sync controller: decides which rollouts start, which groups a step trains on, and which replica gets which
version.

Invariants, in every mode and after every failure:
* no step trains on a rollout older than `asynchrony.staleness` (proof in docs/asynchrony.md);
* each planned rollout is trained at most once, and none is lost: it is trained, recorded as failed, or its iteration is
  recorded as skipped;
* an iteration trains on exactly the groups that were chosen when it began, not on the fastest ones;
* every state has an event that makes progress.

The controller is a pure state machine without clock, network or disk. `apply` takes events. Decisions are questions
that do not change the state, so asking twice is harmless and a decision lost in a crash is made again.

    admission(replica) ──> Continue | Block        training() ──> Train | None
    transfer(replica)  ──> Transfer | None         validation() ──> Validate | None

A run with several models has one controller per model. Events are facts that a journal can keep; replaying them in
order restores the state. An event about stored data (a finished rollout, a new version) is recorded after the data is
stored.

A rollout is named by its group's position in the plan, from 0, and its sample. Iteration k owns the positions (k - 1) *
groups ... k * groups - 1, times the number of rounds it may draw. Attempts count from 1, so that stale events are
recognised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import singledispatchmethod
from typing import Any, NamedTuple

from roundhouse.collection.pool import GroupPool, Key, StalenessBound
from roundhouse.errors import DataError


class RolloutStarted(NamedTuple):
    """A replica's slot began this attempt at a rollout."""

    position: int
    sample: int
    attempt: int
    replica: str


class RolloutFinished(NamedTuple):
    """The attempt completed, was truncated or was masked: the outcome of the rollout is final."""

    position: int
    sample: int
    attempt: int


class RolloutFailed(NamedTuple):
    """The attempt failed. `final`: the rollout gets no further attempt, and its failure counts as its group's outcome."""

    position: int
    sample: int
    attempt: int
    reason: str
    final: bool = False


class RolloutEvicted(NamedTuple):
    """A finished or running rollout was removed from the pool and starts again."""

    position: int
    sample: int
    reason: str


class RoundStarted(NamedTuple):
    """An iteration draws a further round (2, 3, …), because too few groups of the earlier rounds have spread.

    `finished`: (position, sample, oldest version) of the round's rollouts in the store, from an earlier start of this
    round.
    """

    iteration: int
    number: int
    finished: tuple[tuple[int, int, int], ...] = ()


class RoundsEnded(NamedTuple):
    """An iteration draws no further round: enough groups have spread, or this round was the last."""

    iteration: int
    rounds: int


class TrainingStarted(NamedTuple):
    """Validation and training of an iteration began, on exactly these groups."""

    iteration: int
    groups: tuple[int, ...]


class TrainingFinished(NamedTuple):
    """The training step succeeded: the iteration's version is in the store."""

    iteration: int


class TrainingFailed(NamedTuple):
    """The training step made no version; the same groups are trained on again."""

    iteration: int
    reason: str


class IterationSkipped(NamedTuple):
    """The iteration was skipped: its version has the previous version's weights, and its groups are never trained on."""

    iteration: int
    reason: str


class TransferStarted(NamedTuple):
    """The transfer of a version to a replica began."""

    replica: str
    version: int


class TransferFinished(NamedTuple):
    """The transfer succeeded: the replica has proved that it holds all weights of this version."""

    replica: str
    version: int


class TransferFailed(NamedTuple):
    """The transfer failed: the replica's weights are unknown, and it is out of service until a transfer succeeds."""

    replica: str
    reason: str


class ReplicaJoined(NamedTuple):
    """A replica was added; with a version, if it already serves one."""

    replica: str
    version: int | None = None


class ReplicaLost(NamedTuple):
    """A replica was lost, and with it the rollouts that ran on it."""

    replica: str
    reason: str


class ValidationStarted(NamedTuple):
    """The held-out evaluation of a version began."""

    version: int


class ValidationEnded(NamedTuple):
    """The held-out evaluation of a version ended, with a result or without."""

    version: int


class Restarted(NamedTuple):
    """The process that held the rollouts in memory died and was restarted.

    `version`: the newest complete checkpoint. `finished`: (position, sample, oldest version) of stored rollouts without
    an event. `replicas`: (name, version or None) of the present replicas. `failed`: (position, sample) of rollouts that
    are recorded as failed permanently.
    """

    version: int
    finished: tuple[tuple[int, int, int], ...] = ()
    replicas: tuple[tuple[str, int | None], ...] = ()
    failed: tuple[tuple[int, int], ...] = ()


Event = (
    RolloutStarted
    | RolloutFinished
    | RolloutFailed
    | RolloutEvicted
    | RoundStarted
    | RoundsEnded
    | TrainingStarted
    | TrainingFinished
    | TrainingFailed
    | IterationSkipped
    | TransferStarted
    | TransferFinished
    | TransferFailed
    | ReplicaJoined
    | ReplicaLost
    | ValidationStarted
    | ValidationEnded
    | Restarted
)

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in Event.__args__}


def event_to_json(event: Event) -> str:
    """Return an event as one line of a journal."""
    return json.dumps({"event": type(event).__name__, **event._asdict()}, separators=(",", ":"))


def event_from_json(line: str) -> Event:
    """Parse a journal line into an event.

    Raises:
        DataError: the line is not an event.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("event")]
        return kind(**{name: _frozen(value) for name, value in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{line[:200]!r} is not an event of a journal: {error!r}. Cut the journal before this line."
        ) from None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


class Hold(StrEnum):
    """Reasons why a slot gets no rollout now."""

    WEIGHTS = "weights"
    """The next rollout would be too old on this replica; newer weights are being transferred."""
    TRANSFER = "transfer"
    """The replica's weights are being exchanged."""
    BARRIER = "barrier"
    """staleness 0: other replicas have not got the weights yet."""
    VALIDATION = "validation"
    """staleness 0: a held-out evaluation uses the engine."""
    OUT_OF_SERVICE = "out of service"
    """The replica holds no whole version."""
    TRAINING = "training"
    """Everything within the bound has begun, on the newest weights: only a training step opens more."""
    PLAN_ENDED = "plan ended"
    """Every rollout of the plan has begun."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Begin this attempt at a rollout; its first tokens will be those of `version`."""

    position: int
    sample: int
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class Block:
    """Start no rollout in this slot now."""

    reason: Hold

    @property
    def for_weights(self) -> bool:
        """Return whether the slot waits for weights or an evaluation rather than for work."""
        return self.reason not in (Hold.TRAINING, Hold.PLAN_ENDED)


@dataclass(frozen=True, slots=True)
class Train:
    """Train this iteration on exactly these groups, in this order."""

    iteration: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer this version to this replica."""

    replica: str
    version: int


@dataclass(frozen=True, slots=True)
class Validate:
    """Evaluate this version, which every replica holds. No transfer begins before the evaluation ends."""

    version: int


Decision = Continue | Block | Train | Transfer | Validate


@dataclass(slots=True)
class ControlledReplica:
    """An engine that holds one version of the weights."""

    version: int | None = None
    """The version it has proved to hold; None: out of service."""
    incoming: int | None = None
    """The version that it is being given."""
    running: set[Key] = field(default_factory=set)


class Controller:
    """State machine of one model's rollouts, training steps and transfers; the invariants are in the module's
    docstring. `controller_journal.py` has its JSON.
    """

    def __init__(self, terms: StalenessBound, replicas: Iterable[str] = ()) -> None:
        self.terms = terms
        self.pool = GroupPool(terms)
        self.replicas = {name: ControlledReplica() for name in replicas}
        self.version = terms.first_version
        """The newest version in the store."""
        self.batch: tuple[int, ...] | None = None
        """Positions of the groups that the next version is made of, from when its training first began until it is there."""
        self.in_training = False
        self.evaluated = terms.first_version - int(terms.evaluates_first)
        self.evaluating: int | None = None

    # Decisions

    def admission(self, replica: str) -> Continue | Block:
        """Decide what a free slot of this replica does."""
        place = self._replica(replica)
        if place.version is None:
            return Block(Hold.OUT_OF_SERVICE)
        version = place.version
        if place.incoming is not None:
            if not self.terms.starts_during_transfer:
                return Block(Hold.TRANSFER)
            version = place.incoming
        key = self.pool.next()
        if key is None:
            return Block(Hold.PLAN_ENDED)
        if not self.terms.may_begin(key[0], version):
            newer = self.terms.may_begin(key[0], self.version)
            return Block(Hold.WEIGHTS if newer else Hold.TRAINING)
        if self.terms.barrier:
            if self.evaluating is not None or self.terms.due(self.evaluated, self.version) is not None:
                return Block(Hold.VALIDATION)
            if any(each.version not in (None, self.version) for each in self.replicas.values()):
                return Block(Hold.BARRIER)
        return Continue(*key, self.pool.attempt_of(key), version)

    def training(self) -> Train | None:
        """Return the training step that can begin now."""
        if self.in_training or self.finished:
            return None
        batch = self.batch or self.pool.batch()
        return None if batch is None else Train(self.version + 1, batch)

    def transfer(self, replica: str) -> Transfer | None:
        """Return the transfer that this replica needs and that can begin now."""
        place, version = self._replica(replica), self._wanted()
        if place.incoming is not None or (place.version is not None and place.version >= version):
            return None
        if place.version is not None and (self.evaluating is not None or (self.terms.drains and place.running)):
            return None
        return Transfer(replica, version)

    def validation(self) -> Validate | None:
        """Return the version that can be evaluated now, on all replicas in service."""
        due = self.terms.due(self.evaluated, self.version)
        if due is None or self.evaluating is not None:
            return None
        serving = [place for place in self.replicas.values() if place.version is not None]
        is_loaded = all(place.version == due and place.incoming is None for place in serving)
        return Validate(due) if serving and is_loaded else None

    def decisions(self) -> Iterator[Decision]:
        """Yield all decisions that are possible now."""
        if (train := self.training()) is not None:
            yield train
        if (validate := self.validation()) is not None:
            yield validate
        for name in self.replicas:
            if (transfer := self.transfer(name)) is not None:
                yield transfer
            yield self.admission(name)

    @property
    def finished(self) -> bool:
        """Return whether the plan's last version is stored."""
        return self.version == self.terms.iterations

    def has_decided(self, position: int) -> bool:
        """Return whether a step has chosen this group, or the group was dropped."""
        return self.pool.has_left(position) or position in (self.batch or ())

    def ages(self, groups: Iterable[int]) -> list[int]:
        """Ages of the finished rollouts of these groups, if the next step trained on them."""
        group_versions = [self.pool.groups[position].versions.values() for position in groups]
        return [self.version - version for versions in group_versions for version in versions]

    # Events

    @singledispatchmethod
    def apply(self, event: Event) -> None:
        """Apply an event to the state.

        Raises:
            DataError: the event is impossible in this state: a duplicate, or of an abandoned attempt. The state does
                not change.
        """
        raise TypeError(f"{event!r} is not an event of the controller.")

    @apply.register
    def _(self, event: RolloutStarted) -> None:
        answer = self.admission(event.replica)
        if not isinstance(answer, Continue):
            raise DataError(
                f"Rollout {event.position}/{event.sample} began on {event.replica}, which was to wait: {answer.reason}."
            )
        key = (event.position, event.sample)
        self.pool.begin(key, event.attempt, event.replica, answer.version)
        self.replicas[event.replica].running.add(key)

    @apply.register
    def _(self, event: RolloutFinished) -> None:
        key = (event.position, event.sample)
        self._left(key, self.pool.finish(key, event.attempt).replica)

    @apply.register
    def _(self, event: RolloutFailed) -> None:
        key = (event.position, event.sample)
        self._left(key, self.pool.fail(key, event.attempt, event.final).replica)

    @apply.register
    def _(self, event: RolloutEvicted) -> None:
        if self.batch is not None and event.position in self.batch:
            raise DataError(f"Rollout {event.position}/{event.sample} is being trained on and cannot be evicted.")
        for key, running in self.pool.evict((event.position, event.sample)).items():
            self._left(key, running.replica)

    @apply.register
    def _(self, event: RoundStarted) -> None:
        for position, sample, version in event.finished:
            own = self.terms.round_positions(event.iteration, event.number)
            if position not in own or not self.terms.may_begin(position, version):
                raise DataError(
                    f"Rollout {position}/{sample} of version {version} cannot be of round {event.number} of iteration "
                    f"{event.iteration}: it is too old, or of another one."
                )
        self.pool.begin_round(event.iteration, event.number)
        for position, sample, version in event.finished:
            self.pool.adopt((position, sample), version)

    @apply.register
    def _(self, event: RoundsEnded) -> None:
        self.pool.end_rounds(event.iteration, event.rounds)

    @apply.register
    def _(self, event: TrainingStarted) -> None:
        if self.training() != Train(event.iteration, event.groups):
            raise DataError(f"Training of iteration {event.iteration} on {event.groups} was not decided on.")
        self.batch, self.in_training = event.groups, True

    @apply.register
    def _(self, event: TrainingFinished) -> None:
        self._check_training(event.iteration)
        self._trained()

    @apply.register
    def _(self, event: TrainingFailed) -> None:
        self._check_training(event.iteration)
        self.in_training = False

    @apply.register
    def _(self, event: TransferStarted) -> None:
        if self.transfer(event.replica) != Transfer(event.replica, event.version):
            raise DataError(f"The transfer of version {event.version} to {event.replica} was not decided on.")
        self.replicas[event.replica].incoming = event.version

    @apply.register
    def _(self, event: TransferFinished) -> None:
        place = self._replica(event.replica)
        if place.incoming != event.version:
            raise DataError(f"{event.replica} was not being given version {event.version}.")
        place.version, place.incoming = event.version, None

    @apply.register
    def _(self, event: TransferFailed) -> None:
        place = self._replica(event.replica)
        if place.incoming is None:
            raise DataError(f"{event.replica} was being given no version.")
        place.version, place.incoming = None, None
        self._abandon(place)

    @apply.register
    def _(self, event: ReplicaJoined) -> None:
        if event.replica in self.replicas:
            raise DataError(f"{event.replica} is known already. Report its loss first.")
        self.replicas[event.replica] = self._joining(event.version)

    @apply.register
    def _(self, event: ReplicaLost) -> None:
        self._abandon(self._replica(event.replica))
        del self.replicas[event.replica]

    @apply.register
    def _(self, event: ValidationStarted) -> None:
        if self.validation() != Validate(event.version):
            raise DataError(f"The evaluation of version {event.version} was not decided on.")
        self.evaluating = event.version

    @apply.register
    def _(self, event: ValidationEnded) -> None:
        if self.evaluating != event.version:
            raise DataError(f"Version {event.version} was not being evaluated.")
        self.evaluated, self.evaluating = event.version, None

    @apply.register
    def _(self, event: IterationSkipped) -> None:
        if event.iteration != self.version + 1 or self.finished:
            raise DataError(f"Iteration {event.iteration} was not next; the newest version is {self.version}.")
        positions = self.batch if self.batch and self.terms.chooses else self.pool.oldest()
        for place in self.replicas.values():
            place.running = {key for key in place.running if key[0] not in positions}
        self.pool.drop(positions)
        self.batch, self.in_training, self.version = None, False, self.version + 1

    @apply.register
    def _(self, event: Restarted) -> None:
        if event.version not in (self.version, self.version + 1) or (event.version > self.version and not self.batch):
            raise DataError(
                f"The newest checkpoint is of version {event.version}, the controller's state of {self.version}"
                f"{', then in training' if self.batch else ''}: they are not of one run. Restore the one or the other."
            )
        for place in self.replicas.values():
            self._abandon(place)
        if event.version > self.version:
            self._trained()
        for position, sample, version in event.finished:
            if self.terms.may_begin(position, version):  # else it stays among those to begin again
                self.pool.adopt((position, sample), version)
        for position, sample in event.failed:
            self.pool.adopt((position, sample), None)
        self.in_training, self.evaluating = False, None
        self.replicas = {name: self._joining(version) for name, version in event.replicas}

    # Parts of decisions

    def _wanted(self) -> int:
        """Return the version that replicas should hold: the newest one, but not past a version that awaits
        evaluation."""
        due = self.terms.due(self.evaluated, self.version)
        return self.version if due is None else due

    def _replica(self, name: str) -> ControlledReplica:
        if name not in self.replicas:
            raise DataError(f"Replica {name} is unknown. Replicas: {', '.join(self.replicas) or 'none'}.")
        return self.replicas[name]

    def _check_training(self, iteration: int) -> None:
        if not self.in_training or iteration != self.version + 1:
            raise DataError(f"Iteration {iteration} was not in training; the newest version is {self.version}.")

    def _trained(self) -> None:
        assert self.batch is not None
        self.pool.train(self.batch)
        self.batch, self.in_training, self.version = None, False, self.version + 1

    def _joining(self, version: int | None) -> ControlledReplica:
        """Add a new replica. If it serves a version that replicas must not hold yet, it gets other weights before
        use."""
        return ControlledReplica(version if version is not None and version <= self._wanted() else None)

    def _left(self, key: Key, replica: str) -> None:
        self.replicas[replica].running.discard(key)

    def _abandon(self, place: ControlledReplica) -> None:
        for key in sorted(place.running):
            self.pool.abandon(key)
        place.running.clear()


def replay(terms: StalenessBound, replicas: Iterable[str], journal: Iterable[Event]) -> Controller:
    """Return the controller after these events."""
    controller = Controller(terms, replicas)
    for event in journal:
        controller.apply(event)
    return controller
