"""Algorithms: rules from sequences and rewards to per-token columns.

Invariant: a kind has one algorithm, and only the algorithm's module knows it. An algorithm is a plug-in of role `algorithm`: a
section that extends `PolicyGradient`, and a class that is made with it.

    class SignOnly(PolicyGradientAlgorithm): ...
    SIGN_ONLY = Plugin(factory=SignOnly, section=SignOnlyConfig)

The kind `custom` is a user's class, by `module:Class` or `path/to/file.py:Class`.

The trainer does not depend on the algorithm, which gives it numbers per token (`TokenColumns`) and the constants of the
token loss (`LossSettings`). The trainer minimises, over all tokens with a non-zero weight,

    scale · ( policy_weight · policy_loss(advantage) + cross_entropy_weight · (−cur)
              + reference_kl_weight · KL − entropy_weight · entropy )

with a `scale` that makes it a mean (`loss.sequence_scale`). A token with weights that are all zero is not trained on
and counts in no denominator; a sequence of such tokens is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

import numpy as np

from roundhouse import plugins
from roundhouse.config.algorithms import (
    Aggregation,
    CustomAlgorithmConfig,
    MismatchCorrection,
    TokenLoss,
)
from roundhouse.errors import ConfigError, DataError
from roundhouse.imports import load_class
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.metrics import METRICS, Denominator


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants of the token loss; formulas in `loss` and `mismatch`, meanings in `roundhouse.config.algorithms`."""

    policy_loss: str = "clipped"
    """clipped, cispo, reinforce, or the name of a function (`loss.policy_loss`)."""
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
        """Return whether a token's term depends on the other tokens of its sequence."""
        return (
            self.importance_ratio == "sequence"
            or self.mismatch_correction in ("auto", "seq-mask-tis")
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
    """Facts about the tokens before the columns are made."""

    old: np.ndarray | None = None
    """[T] float32: log-probabilities under the weights before the first update; given when `needs_log_probs`."""
    reference: np.ndarray | None = None
    """[T] float32: those of the reference (of a teacher, in distillation); given when both `needs_…` hold."""
    kl_coefficient: float | None = None
    """State of an adaptive controller; None: the configured initial value."""
    values: np.ndarray | None = None
    """[T] float32: the critic's prediction before each generated token; given when the section has a critic."""
    final_values: np.ndarray | None = None
    """[S] float32: the prediction after the last generated token of a truncated sequence, 0 for the others; given
    with `values`."""


@dataclass(frozen=True, slots=True)
class TokenSignals:
    """An algorithm's result for an iteration's sequences."""

    columns: TokenColumns
    metrics: dict[str, float] = field(default_factory=dict)
    """By the names of `metrics.METRICS`."""
    sequence_columns: dict[str, np.ndarray] = field(default_factory=dict)
    """[S] each: values for people to inspect (advantage, baseline)."""
    returns: np.ndarray | None = None
    """[T] float32: the critic's target at each token with a policy weight; None without a critic."""


class Algorithm(Protocol):
    """A source of columns."""

    @property
    def loss(self) -> LossSettings:
        """Constants of the token loss."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Return whether a reference (or teacher) model must be loaded."""
        ...

    @property
    def needs_log_probs(self) -> bool:
        """Return whether `compute` reads log-probabilities, so that they are computed for all sequences."""
        ...

    def compute(self, sequences: TrainingSequences, inputs: AlgorithmInputs = ...) -> TokenSignals:
        """Compute the columns; a pure function of the arguments.

        Raises:
            DataError: the sequences lack data that the algorithm needs.
        """
        ...


def no_columns(sequences: TrainingSequences) -> TokenColumns:
    """Columns that train nothing."""
    return TokenColumns(**{each.name: np.zeros(len(sequences.token_ids), np.float32) for each in fields(TokenColumns)})


def check_columns(columns: TokenColumns, sequences: TrainingSequences, origin: str) -> None:
    """Refuse columns that would train the wrong tokens; `origin` names their source.

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


_MEMBERS = ("loss", "needs_reference", "needs_log_probs", "compute")
_COMPLETE = (
    "Subclass PolicyGradientAlgorithm (roundhouse.training.algorithms.policy_gradient), or give all of Algorithm "
    "(roundhouse.training.algorithms)."
)


class ByEnvironment:
    """Separate algorithm settings for environments of a mixture (`train.algorithm.environments`).

    Invariant: the columns of a listed environment's sequences are exactly the output of its algorithm for them
    alone; the run's algorithm computes all other columns from the rest together. They enter one loss.

        groups      calc/1 calc/2 words/1 words/2       environments: {words: {normalize_by_std: false}}
        algorithm   └── run's ──┘ └── words' ───┘
    """

    def __init__(self, shared: Algorithm, own: Mapping[str, Algorithm]) -> None:
        """
        Args:
            shared: the run's, of the environments that are not in `own`.

        Raises:
            ConfigError: the loss of one differs from the run's.
        """
        for name, algorithm in own.items():
            if algorithm.loss != shared.loss:
                raise ConfigError(
                    f"train.algorithm.environments.{name} changes the loss on tokens to {algorithm.loss}, but all "
                    f"environments share one loss: {shared.loss}. The class's `loss` must not depend on keys of an environment."
                )
        self._shared, self._own = shared, own

    @property
    def loss(self) -> LossSettings:
        return self._shared.loss

    @property
    def needs_reference(self) -> bool:
        return self._shared.needs_reference

    @property
    def needs_log_probs(self) -> bool:
        return any(algorithm.needs_log_probs for algorithm in (self._shared, *self._own.values()))

    def compute(self, sequences: TrainingSequences, inputs: AlgorithmInputs = AlgorithmInputs()) -> TokenSignals:
        owners = np.array([group_id.partition("/")[0] for group_id in sequences.group_ids])
        shares = [(owners == name, algorithm) for name, algorithm in self._own.items()]
        shares.append((~np.isin(owners, list(self._own)), self._shared))
        present = [(chosen, algorithm) for chosen, algorithm in shares if chosen.any()]
        parts = []
        for chosen, algorithm in present:
            parts.append(algorithm.compute(sequences.select(chosen), _of_sequences(inputs, chosen, sequences.lengths)))
        return _joined(sequences, [chosen for chosen, _ in present], parts)


def _of_sequences(inputs: AlgorithmInputs, chosen: np.ndarray, lengths: np.ndarray) -> AlgorithmInputs:
    """The inputs of the `chosen` sequences ([S] bool)."""
    values = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    tokens = np.repeat(chosen, lengths)
    places = {name: chosen if name == "final_values" else tokens for name in values}
    return replace(
        inputs, **{name: value[places[name]] for name, value in values.items() if isinstance(value, np.ndarray)}
    )


def _joined(sequences: TrainingSequences, chosen: Sequence[np.ndarray], parts: Sequence[TokenSignals]) -> TokenSignals:
    """Return the parts' columns, each at the places of its sequences ([S] bool each)."""
    tokens = [np.repeat(each, sequences.lengths) for each in chosen]
    columns = {field.name: np.zeros(len(sequences.token_ids), dtype=np.float32) for field in fields(TokenColumns)}
    for name, column in columns.items():
        for places, part in zip(tokens, parts, strict=True):
            column[places] = getattr(part.columns, name)
    returns = None
    if any(part.returns is not None for part in parts):
        returns = np.zeros(len(sequences.token_ids), dtype=np.float32)
        for places, part in zip(tokens, parts, strict=True):
            returns[places] = part.returns
    names = dict.fromkeys(name for part in parts for name in part.sequence_columns)
    sequence_columns = {name: np.full(len(sequences), np.nan) for name in names}
    for places, part in zip(chosen, parts, strict=True):
        for name, values in part.sequence_columns.items():
            sequence_columns[name][places] = values
    generated = [float(sequences.loss_mask[places].sum()) for places in tokens]
    return TokenSignals(TokenColumns(**columns), _joined_metrics(parts, chosen, generated), sequence_columns, returns)


def _joined_metrics(
    parts: Sequence[TokenSignals], chosen: Sequence[np.ndarray], generated: Sequence[float]
) -> dict[str, float]:
    """Combine metrics: means by their denominators, counts by sums, extremes by extremes, states from the run's part,
    the last."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        values, weights = [], []
        for part, own, tokens in zip(parts, chosen, generated, strict=True):
            if name in part.metrics:
                counts = {
                    Denominator.TOKENS: tokens,
                    Denominator.GROUPS: part.metrics.get("num_groups", 1.0),
                    Denominator.ROLLOUTS: part.metrics.get("num_rollouts", 1.0),
                }
                values.append(part.metrics[name])
                weights.append(counts.get(METRICS[name].denominator, float(own.sum())))
        combined = {
            Denominator.SUM: sum(values),
            Denominator.MAX: max(values),
            Denominator.MIN: min(values),
            Denominator.LAST: values[-1],
        }
        mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        metrics[name] = combined.get(METRICS[name].denominator, mean)
    return metrics


def build_algorithm(config: TokenLoss) -> Algorithm:
    """Make the algorithm of a section.

    Raises:
        ConfigError: its plug-in or a custom class cannot be imported or made, or lacks a part of `Algorithm`.
    """
    shared: Algorithm = plugins.factory("algorithm", config.kind)(config)
    if lacking := [name for name in _MEMBERS if not hasattr(type(shared), name)]:
        raise ConfigError(
            f"train.algorithm.kind is {config.kind}: {type(shared).__name__} of its plug-in has no {', '.join(lacking)}. "
            f"{_COMPLETE}"
        )
    own = {name: build_algorithm(each) for name, each in config.by_environment().items()}
    return ByEnvironment(shared, own) if own else shared


def load_custom(config: CustomAlgorithmConfig) -> Algorithm:
    """Make `Class(config, **parameters)` of a user's own class."""
    key = f"train.algorithm.target is {config.target!r}"
    algorithm_class: type[Any] = load_class(config.target, object, "train.algorithm.target")
    if lacking := [name for name in _MEMBERS if not hasattr(algorithm_class, name)]:
        raise ConfigError(f"{key}: the class has no {', '.join(lacking)}. {_COMPLETE}")
    try:
        return algorithm_class(config, **config.parameters)
    except TypeError as error:
        raise ConfigError(
            f"{key}: it cannot be made with train.algorithm.parameters {config.parameters} ({error})."
        ) from error
