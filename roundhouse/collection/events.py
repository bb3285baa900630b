"""What happens to a run, as facts that a journal can keep.

Invariant: the events, in order, are everything that the controller's state is made of; a decision is never one. An event
that reports a fact (a rollout finished, a version was made) is recorded after the fact is in the store.

A rollout is named by its group's position in the plan, from 0, and its sample; iteration k's own groups are the positions
(k - 1) * groups ... k * groups - 1, with as many times more for each if it may draw several rounds. Attempts count from 1, so
that the late word of one that was given up is known as such.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from roundhouse.errors import DataError


class RolloutStarted(NamedTuple):
    """A replica's slot was given this rollout."""

    position: int
    sample: int
    attempt: int
    replica: str


class RolloutFinished(NamedTuple):
    """It completed, was truncated or masked: its outcome is final."""

    position: int
    sample: int
    attempt: int


class RolloutFailed(NamedTuple):
    """It did not. `final`: no further attempt; it is on record as failed and counts as its group's outcome."""

    position: int
    sample: int
    attempt: int
    reason: str
    final: bool = False


class RolloutEvicted(NamedTuple):
    """A finished or running rollout was taken out of the pool and is to be rolled out again."""

    position: int
    sample: int
    reason: str


class RoundStarted(NamedTuple):
    """An iteration draws a further round (2, 3, …): of the groups of those before too few have spread.

    `finished`: (position, sample, oldest version) of its rollouts that are in the store, from an earlier time that it began.
    """

    iteration: int
    number: int
    finished: tuple[tuple[int, int, int], ...] = ()


class RoundsEnded(NamedTuple):
    """An iteration that may draw several rounds draws no further one: enough groups have spread, or this was the last."""

    iteration: int
    rounds: int


class TrainingStarted(NamedTuple):
    """Validation and training of an iteration began, on exactly these groups."""

    iteration: int
    groups: tuple[int, ...]


class TrainingFinished(NamedTuple):
    """The iteration's version is in the store."""

    iteration: int


class TrainingFailed(NamedTuple):
    """It made no version; the same groups are trained on again."""

    iteration: int
    reason: str


class IterationSkipped(NamedTuple):
    """The iteration's version is in the store and is the one before; its groups are never trained on."""

    iteration: int
    reason: str


class TransferStarted(NamedTuple):
    """A replica is being given a version."""

    replica: str
    version: int


class TransferFinished(NamedTuple):
    """The replica has proved that it holds this version whole."""

    replica: str
    version: int


class TransferFailed(NamedTuple):
    """The replica holds nothing that can be trusted: out of service until a transfer succeeds."""

    replica: str
    reason: str


class ReplicaJoined(NamedTuple):
    """A replica is there; with a version, if it already serves one."""

    replica: str
    version: int | None = None


class ReplicaLost(NamedTuple):
    """A replica is gone, and what ran on it."""

    replica: str
    reason: str


class ValidationStarted(NamedTuple):
    """The held-out evaluation of a version began."""

    version: int


class ValidationEnded(NamedTuple):
    """It ended, with a result or without."""

    version: int


class Restarted(NamedTuple):
    """The process that held the rollouts in memory died and is back.

    `version`: the newest complete checkpoint. `finished`: (position, sample, oldest version) of rollouts in the store that no
    event told of. `replicas`: (name, version or None) of the replicas that are there now. `failed`: (position, sample) of
    rollouts that are on record as failed for good.
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
    """One line of a journal."""
    return json.dumps({"event": type(event).__name__, **event._asdict()}, separators=(",", ":"))


def event_from_json(line: str) -> Event:
    """The event of a journal's line.

    Raises:
        DataError: it is none.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("event")]
        return kind(**{name: _frozen(value) for name, value in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{line[:200]!r} is no event of a journal: {error!r}. Cut the journal before this line."
        ) from None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


class Hold(StrEnum):
    """Why a slot gets no rollout now."""

    WEIGHTS = "weights"
    """What is next would be too old on this replica; newer weights are on their way."""
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
    """Begin nothing now."""

    reason: Hold

    @property
    def for_weights(self) -> bool:
        """Whether the slot waits for weights or an evaluation, rather than for work."""
        return self.reason not in (Hold.TRAINING, Hold.PLAN_ENDED)


@dataclass(frozen=True, slots=True)
class Train:
    """Train this iteration on exactly these groups, in this order."""

    iteration: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Give this replica this version."""

    replica: str
    version: int


@dataclass(frozen=True, slots=True)
class Validate:
    """Every replica holds this version: evaluate it. No transfer begins before it ends."""

    version: int


Decision = Continue | Block | Train | Transfer | Validate
