"""What an algorithm is: a rule from sequences and their rewards to per-token columns. The trainer knows no algorithm.

Invariant: everything that tells one algorithm from another reaches the trainer as numbers per token (`TokenColumns`) and
the constants of the token loss (`LossSettings`). The trainer minimises, over all tokens with a non-zero weight,

    scale · ( policy_weight · policy_loss(advantage) + cross_entropy_weight · (−cur)
              + reference_kl_weight · KL − entropy_weight · entropy )

where `scale` makes it a mean (`loss.sequence_scale`). A token whose weights are all zero is not trained on and counts in no
denominator; a sequence without any other token is not even computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

import numpy as np

from roundhouse.config.objectives import Aggregation, MismatchCorrection
from roundhouse.errors import DataError
from roundhouse.training.batch import TrainingSequences


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants of the token loss; formulas in `loss` and `mismatch`, meanings in `roundhouse.config.objectives`."""

    policy_loss: Literal["clipped", "cispo", "reinforce"] = "clipped"
    importance_ratio: Literal["token", "sequence", "on_policy"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_importance_weighting: bool = False
    aggregation: Aggregation = "token"
    fixed_length: int | None = None
    mismatch_correction: MismatchCorrection = "none"
    mismatch_bounds: tuple[float, float] = (0.5, 5.0)
    max_sequence_error: float | None = None

    @property
    def whole_sequences(self) -> bool:
        """Whether a token's term depends on the other tokens of its sequence."""
        return (
            self.importance_ratio == "sequence"
            or self.mismatch_correction == "seq-mask-tis"
            or self.max_sequence_error is not None
        )


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """One value a token of the sequences, all [T] float32 and zero off the loss mask. Weights include coefficients."""

    advantages: np.ndarray
    policy_weights: np.ndarray
    reference_kl_weights: np.ndarray
    entropy_weights: np.ndarray
    cross_entropy_weights: np.ndarray

    @property
    def trained(self) -> np.ndarray:
        """[T] bool: the tokens that take part in the loss."""
        weights = (self.policy_weights, self.reference_kl_weights, self.entropy_weights, self.cross_entropy_weights)
        return np.logical_or.reduce([column != 0 for column in weights])


@dataclass(frozen=True, slots=True)
class AlgorithmInputs:
    """What the trainer knows of the tokens before the columns are made."""

    old: np.ndarray | None = None
    """[T] float32: log-probabilities under the weights before the first update; given when `needs_log_probs`."""
    reference: np.ndarray | None = None
    """[T] float32: those of the reference (of a teacher, in distillation); given when both `needs_…` hold."""
    kl_coefficient: float | None = None
    """Where an adaptive controller stands; None: where the configuration starts."""


@dataclass(frozen=True, slots=True)
class TokenSignals:
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
        """Whether a reference (or teacher) model has to be loaded."""
        ...

    @property
    def needs_log_probs(self) -> bool:
        """Whether `compute` reads the log-probabilities of its inputs, so that they are computed for all sequences."""
        ...

    def compute(self, sequences: TrainingSequences, inputs: AlgorithmInputs = ...) -> TokenSignals:
        """Compute the columns; pure, the same for the same arguments.

        Raises:
            DataError: the sequences lack what the algorithm needs.
        """
        ...


def check_columns(columns: TokenColumns, sequences: TrainingSequences, origin: str) -> None:
    """Refuse columns that would train the wrong tokens; `origin` names who made them.

    Raises:
        DataError: a column has another length than the tokens, a value that is not finite, or one off the loss mask.
    """
    for name in (column.name for column in fields(TokenColumns)):
        values = getattr(columns, name)
        if values.shape != sequences.token_ids.shape:
            raise DataError(
                f"{origin}: column {name} has the shape {values.shape}, the sequences have {len(sequences.token_ids)} tokens."
            )
        if len(wrong := np.flatnonzero(~np.isfinite(values))):
            raise DataError(
                f"{origin}: column {name} of sequence {_owner(sequences, wrong[0])!r} is {values[wrong[0]]}. Every value "
                "has to be finite."
            )
        if len(wrong := np.flatnonzero((values != 0) & ~sequences.loss_mask)):
            raise DataError(
                f"{origin}: column {name} of sequence {_owner(sequences, wrong[0])!r} is not 0 on a token that the policy "
                "did not generate. Multiply it by the loss mask."
            )


def _owner(sequences: TrainingSequences, token: int) -> str:
    return sequences.sequence_ids[int(sequences.sequence_of_token[token])]
