"""What the controller answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
