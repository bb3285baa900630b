"""What an algorithm is: a rule from sequences and their rewards to per-token columns. The trainer knows no algorithm.

Invariant: everything that tells one algorithm from another reaches the trainer as numbers per token (`TokenColumns`) and
the constants of the token loss (`LossSettings`). The trainer minimises, over all tokens with a non-zero weight,

    scale · ( policy_weight · policy_loss(advantage) + reference_kl_weight · KL − entropy_weight · entropy )

where `scale` makes it a mean (`loss.sequence_scale`). A token whose weights are all zero is not trained on and counts in no
denominator; a sequence without any other token is not even computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from roundhouse.config.models import GRPO
from roundhouse.training.batch import TrainingSequences


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants of the token loss; formulas in `loss` and `mismatch`."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    aggregation: Literal["token", "sequence"] = "token"
    mismatch_correction: Literal["none", "tis", "icepop"] = "none"
    mismatch_bounds: tuple[float, float] = (0.5, 5.0)


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """One value a token of the sequences, all [T] float32 and zero off the loss mask. Weights include coefficients."""

    advantages: np.ndarray
    policy_weights: np.ndarray
    reference_kl_weights: np.ndarray
    entropy_weights: np.ndarray

    @property
    def trained(self) -> np.ndarray:
        """[T] bool: the tokens that take part in the loss."""
        return (self.policy_weights != 0) | (self.reference_kl_weights != 0) | (self.entropy_weights != 0)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an algorithm makes of an iteration's sequences."""

    columns: TokenColumns
    metrics: dict[str, float] = field(default_factory=dict)
    """By the names of `metrics.METRICS`."""
    sequence_columns: dict[str, np.ndarray] = field(default_factory=dict)
    """[S] each: what a person wants to see beside a sequence (advantage, baseline)."""


class Algorithm(Protocol):
    """A source of columns."""

    @property
    def loss(self) -> LossSettings:
        """Constants of the token loss."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether any reference-KL weight can be non-zero, so that the reference model has to be loaded."""
        ...

    def stamp(self, sequences: TrainingSequences) -> Stamp:
        """Compute the columns; pure, the same for the same sequences."""
        ...


def build_algorithm(config: GRPO) -> Algorithm:
    """The algorithm that a configuration names."""
    from roundhouse.training.grpo import GroupRelative

    return GroupRelative(config)
