"""REINFORCE++: a critic-free policy gradient with the KL as a reward of each token (arXiv 2501.03262).

Invariant: the reward stands on a rollout's last token and each token pays for its own KL, so a token's return is what comes
after it; the advantages of the iteration's trained tokens have mean 0 and variance 1.

    A_t = r − m − β · Σ_{i ≥ t} KL_i            m: the group's mean, with minus_baseline
    A_t ← (A_t − mean) / sqrt(max(variance, 1e-8))        over all trained tokens of the iteration

All rollouts teach, also those of a group without spread: the baseline is the batch, and their KL counts. Only the last of a
group, whose mean is its own reward, does not with minus_baseline: its KL alone would be what it teaches.
"""

from __future__ import annotations

import numpy as np

from roundhouse.config.algorithms import ReinforcePlusPlusConfig
from roundhouse.training.algorithms import register
from roundhouse.training.algorithms.policy_gradient import PolicyGradientAlgorithm, Rewards, per_token
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.rewards import Groups, to_go

VARIANCE_FLOOR = 1e-8


@register(ReinforcePlusPlusConfig)
class ReinforcePlusPlus(PolicyGradientAlgorithm):
    """Returns, normalised over the tokens of the iteration."""

    kl_of_rollouts = False

    def __init__(self, config: ReinforcePlusPlusConfig) -> None:
        super().__init__(config)
        self.minus_baseline, self.normalize_batch = config.minus_baseline, config.normalize_batch

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        returns = per_token(rewards.values - self.baselines(groups), sequences)
        if rewards.kl is not None:
            returns = returns - to_go(rewards.kl, sequences.offsets)
        if not self.normalize_batch:
            return returns
        left_out = np.repeat(sequences.truncated, sequences.lengths) & self.config.mask_truncated
        trainable = np.repeat(self.trainable_sequences(sequences, groups), sequences.lengths)
        trained = returns[sequences.loss_mask & trainable & ~left_out]
        if not len(trained):
            return returns
        return (returns - trained.mean()) / np.sqrt(max(trained.var(), VARIANCE_FLOOR))

    def baselines(self, groups: Groups) -> np.ndarray:
        means = groups.of_sequences(groups.means)
        return means if self.minus_baseline else np.zeros_like(means)

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        return groups.of_sequences(groups.sizes > 1) if self.minus_baseline else np.ones(len(sequences), dtype=bool)
