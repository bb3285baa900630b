"""What an algorithm is, and the registry: a rule from sequences and rewards to per-token columns, found by its section.

Invariant: a section has one algorithm, its own or that of the section it extends, and only the algorithm's module knows it. A
new built-in algorithm is two files: a section in `roundhouse.config.algorithms`, and a module in this directory, found by being
here.

    @register(SignOnlyConfig)
    class SignOnly(PolicyGradientAlgorithm): ...

The kind `custom` is a user's own class, by `module:Class` or `path/to/file.py:Class`.

The trainer knows no algorithm: everything that distinguishes algorithms reaches the trainer as numbers per token
(`TokenColumns`) and the constants of the token loss (`LossSettings`). The trainer minimises, over all tokens with a non-zero
weight,

    scale · ( policy_weight · policy_loss(advantage) + cross_entropy_weight · (−cur)
              + reference_kl_weight · KL − entropy_weight · entropy )

where `scale` makes it a mean (`loss.sequence_scale`). A token whose weights are all zero is not trained on and counts in no
denominator; a sequence without any other token is not even computed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from roundhouse.config.algorithms import (
    Aggregation,
    CustomAlgorithmConfig,
    MismatchCorrection,
    PolicyGradient,
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
    """State of an adaptive controller; None: where the configuration starts."""
    values: np.ndarray | None = None
    """[T] float32: the critic's prediction before each generated token; given when the section has a critic."""
    final_values: np.ndarray | None = None
    """[S] float32: its prediction behind the last generated token of a truncated sequence, 0 for the others; given with
    `values`."""


@dataclass(frozen=True, slots=True)
class TokenSignals:
    """What an algorithm makes of an iteration's sequences."""

    columns: TokenColumns
    metrics: dict[str, float] = field(default_factory=dict)
    """By the names of `metrics.METRICS`."""
    sequence_columns: dict[str, np.ndarray] = field(default_factory=dict)
    """[S] each: what a person wants to see with a sequence (advantage, baseline)."""
    returns: np.ndarray | None = None
    """[T] float32: what the critic is to predict at each token with a policy weight; None without a critic."""


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


Factory = TypeVar("Factory", bound=Callable[..., Algorithm])

_FACTORIES: dict[type[TokenLoss], Callable[..., Algorithm]] = {}
_MEMBERS = ("loss", "needs_reference", "needs_log_probs", "compute")


class ByEnvironment:
    """The environments of a mixture, each learnt from with its own settings (`train.algorithm.environments`).

    Invariant: the columns of an environment's sequences are exactly those that its algorithm computes from them alone, and the
    columns of all others those that the run's algorithm computes from them together. The loss that the columns enter is one.

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
                    f"train.algorithm.environments.{name} changes the loss on tokens to {algorithm.loss}, which is one for all "
                    f"environments: {shared.loss}. Let the class's `loss` depend on no key that an environment sets."
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
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    tokens = np.repeat(chosen, lengths)
    places = {name: chosen if name == "final_values" else tokens for name in given}
    return replace(
        inputs, **{name: value[places[name]] for name, value in given.items() if isinstance(value, np.ndarray)}
    )


def _joined(sequences: TrainingSequences, chosen: Sequence[np.ndarray], parts: Sequence[TokenSignals]) -> TokenSignals:
    """The parts' columns, each at the places of its own sequences ([S] bool each)."""
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
    shown = {name: np.full(len(sequences), np.nan) for name in names}
    for places, part in zip(chosen, parts, strict=True):
        for name, values in part.sequence_columns.items():
            shown[name][places] = values
    generated = [float(sequences.loss_mask[places].sum()) for places in tokens]
    return TokenSignals(TokenColumns(**columns), _joined_metrics(parts, chosen, generated), shown, returns)


def _joined_metrics(
    parts: Sequence[TokenSignals], chosen: Sequence[np.ndarray], generated: Sequence[float]
) -> dict[str, float]:
    """Means by what they are over, counts added, extremes of extremes; of a state the run's, which is the last part's."""
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


def register(section: type[TokenLoss]) -> Callable[[Factory], Factory]:
    """Make the class that follows, called with the section, the algorithm of this section and of those that extend it."""

    def add(factory: Factory) -> Factory:
        _FACTORIES[section] = factory
        return factory

    return add


def build_algorithm(config: TokenLoss) -> Algorithm:
    """The algorithm of a section.

    Raises:
        ConfigError: the section has none, or a custom one cannot be imported or made.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for section in type(config).__mro__:
        if section in _FACTORIES:
            shared: Algorithm = _FACTORIES[section](config)
            if not isinstance(config, PolicyGradient) or not config.environments:
                return shared
            return ByEnvironment(
                shared, {name: build_algorithm(config.of_environment(name)) for name in config.environments}
            )
    raise ConfigError(
        f"No algorithm is registered for {type(config).__name__}: decorate its class with @register in a module of "
        "roundhouse/training/algorithms."
    )


@register(CustomAlgorithmConfig)
def _load_custom(config: CustomAlgorithmConfig) -> Algorithm:
    """Make `Class(config, **parameters)` of a user's own class."""
    key = f"train.algorithm.target is {config.target!r}"
    found: type[Any] = load_class(config.target, object, "train.algorithm.target")
    if lacking := [name for name in _MEMBERS if not hasattr(found, name)]:
        raise ConfigError(
            f"{key}: the class has no {', '.join(lacking)}. Subclass PolicyGradientAlgorithm "
            "(roundhouse.training.algorithms.policy_gradient), or give all of Algorithm (roundhouse.training.algorithms)."
        )
    try:
        return found(config, **config.parameters)
    except TypeError as error:
        raise ConfigError(
            f"{key}: it cannot be made with train.algorithm.parameters {config.parameters} ({error})."
        ) from error
