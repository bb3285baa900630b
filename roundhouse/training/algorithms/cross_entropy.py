"""Cross-entropy on chosen rollouts: supervised fine-tuning when all are chosen, rejection sampling when the good ones are.

Invariant: a rollout is chosen or not as a whole, with all its sequences, and the loss is the mean of −cur over the generated
tokens of the chosen ones; no advantage, no ratio, no engine log-probability enters it.

    rewards of a group 0 1 1 0      all: all four      threshold 1: the second and third      best_of_group: the second
"""

from __future__ import annotations

import numpy as np

from roundhouse.config.algorithms import CrossEntropyConfig
from roundhouse.training.algorithm import AlgorithmInputs, LossSettings, TokenColumns, TokenSignals
from roundhouse.training.algorithms import register
from roundhouse.training.algorithms.policy_gradient import current_coefficient, reward_metrics, token_weights
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.rewards import Groups


@register(CrossEntropyConfig)
class CrossEntropy:
    """Weight 1 on the generated tokens of the chosen rollouts."""

    needs_log_probs = False

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config

    @property
    def loss(self) -> LossSettings:
        config = self.config
        return LossSettings(
            kl_estimator=config.kl_estimator,
            kl_importance_weighting=config.kl_importance_weighting,
            aggregation=config.loss_aggregation,
            fixed_length=config.fixed_length,
        )

    @property
    def needs_reference(self) -> bool:
        return self.config.reference_source is not None

    def compute(self, sequences: TrainingSequences, inputs: AlgorithmInputs = AlgorithmInputs()) -> TokenSignals:
        groups = Groups.of(sequences)
        chosen = self._chosen(sequences, groups)
        weights = token_weights(chosen[groups.rollout_of_sequence], sequences)
        coefficient = current_coefficient(self.config, inputs)
        nothing = np.zeros_like(weights)
        columns = TokenColumns(
            advantages=nothing,
            policy_weights=nothing,
            reference_kl_weights=weights * np.float32(coefficient),
            entropy_weights=weights * np.float32(self.config.entropy_coefficient),
            cross_entropy_weights=weights,
        )
        metrics = reward_metrics(sequences, groups) | {"num_selected": float(chosen.sum())}
        if coefficient > 0:
            metrics["kl_coefficient"] = coefficient
        return TokenSignals(columns, metrics)

    def _chosen(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        """[R] bool."""
        config, rewards = self.config, groups.rollout_rewards
        allowed = np.ones(len(rewards), dtype=bool)
        if not config.include_truncated:
            allowed[groups.rollout_of_sequence[sequences.truncated]] = False
        if config.reward_threshold is not None:
            allowed &= rewards >= config.reward_threshold
        if config.select != "best_of_group":
            return allowed
        # Of each group the first of the allowed rollouts with the highest reward, if any is allowed.
        order = np.lexsort((np.arange(len(rewards)), -rewards))
        candidates = order[allowed[order]]
        _, first = np.unique(groups.group_of_rollout[candidates], return_index=True)
        chosen = np.zeros(len(rewards), dtype=bool)
        chosen[candidates[first]] = True
        return chosen
