"""The environments of a mixture, each learnt from with its own settings (`train.algorithm.environments`).

Invariant: the columns of an environment's sequences are exactly those that its algorithm computes from them alone, and the
columns of all others those that the run's algorithm computes from them together. The loss that the columns enter is one.

    groups      calc/1 calc/2 words/1 words/2       environments: {words: {normalize_by_std: false}}
    algorithm   └── run's ──┘ └── words' ───┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from roundhouse.errors import ConfigError
from roundhouse.training.algorithms import Algorithm, AlgorithmInputs, LossSettings, TokenColumns, TokenSignals
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.metrics import METRICS, Denominator


class ByEnvironment:
    """An algorithm of algorithms; see the module's docstring."""

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
