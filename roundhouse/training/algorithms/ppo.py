"""PPO with a critic: advantages relative to a second model's prediction at each token.

Invariant: only generated tokens have values and advantages. A trace follows the generated tokens of a sequence in
order, across turns and the environment's text between them; the last one gets the rollout's reward.

    δ_t = r_t + γ · V_{t+1} − V_t        A_t = δ_t + γ · λ · A_{t+1}        R_t = A_t + V_t

with t over generated tokens, V_t the critic's prediction from everything before token t, and r_t = 0 except for the
last token's reward and, if the KL is in the reward, each token's KL (Schulman et al., arXiv 1506.02438, equations 11
and 16; the loop of TRL's PPOTrainer). After the last token V is 0 if the rollout ended by itself, and the critic's
prediction if a limit cut it, so that a limit is not a verdict (Pardo et al., arXiv 1712.00378).

    mask      0 0 1 1 0 0 1        γ = λ = 1, reward 1, V = .2 .5 .6 on the three generated tokens
    A             .8 .5     .4
    R              1  1      1

Each sequence of a split rollout is a separate trace with the rollout's reward and end, as in every other algorithm.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roundhouse.config.algorithms import PPOConfig
from roundhouse.training.algorithms import AlgorithmInputs, TokenSignals
from roundhouse.training.algorithms.policy_gradient import (
    CriticEstimates,
    Groups,
    PolicyGradientAlgorithm,
    Rewards,
    normalized,
    per_sequence,
)
from roundhouse.training.batch import TrainingSequences


class PPO(PolicyGradientAlgorithm):
    """Every rollout teaches: the critic is the baseline, so that no group and no spread is needed."""

    kl_of_rollouts = False

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.gamma, self.gae_lambda, self.whiten = config.gamma, config.gae_lambda, config.whiten_advantages

    def compute(self, sequences: TrainingSequences, inputs: AlgorithmInputs = AlgorithmInputs()) -> TokenSignals:
        signals = super().compute(sequences, inputs)
        assert inputs.values is not None, "read_rewards requires it"
        expected = per_sequence(inputs.values, sequences)
        return replace(signals, sequence_columns=signals.sequence_columns | {"baseline": expected})

    def read_rewards(
        self, sequences: TrainingSequences, plain: Groups, inputs: AlgorithmInputs, coefficient: float
    ) -> Rewards:
        if inputs.values is None or inputs.final_values is None:
            raise ValueError("PPO needs the critic's values")
        rewards = super().read_rewards(sequences, plain, inputs, coefficient)
        by_token = np.zeros(len(sequences.token_ids)) if rewards.kl is None else -rewards.kl
        by_token[last_generated(sequences)] += rewards.values
        ends = last_sequences(plain)
        advantages = generalized_advantages(
            by_token,
            inputs.values.astype(np.float64),
            inputs.final_values.astype(np.float64)[ends],
            sequences,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        return replace(rewards, estimates=CriticEstimates(advantages, advantages + inputs.values))

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        assert rewards.estimates is not None, "read_rewards sets it"
        advantages = rewards.estimates.advantages
        if not self.whiten:
            return advantages
        left_out = np.repeat(sequences.truncated, sequences.lengths) & self.config.mask_truncated
        return normalized(advantages, sequences.loss_mask & ~left_out)

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        return np.ones(len(sequences), dtype=bool)


def generalized_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    final_values: np.ndarray,
    sequences: TrainingSequences,
    *,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Return [T] float64 advantages of the generated tokens, 0 elsewhere.

    All sequences step back by one generated token at a time, so the number of Python steps is that of the longest
    sequence.

    Args:
        rewards: [T] of each token.
        values: [T] before each generated token.
        final_values: [S] after the last one.
    """
    generated = np.flatnonzero(sequences.loss_mask)
    counts = np.add.reduceat(sequences.loss_mask.astype(np.int64), sequences.offsets[:-1])
    stops = np.cumsum(counts)
    advantages = np.zeros(len(rewards))
    following, ahead = final_values.copy(), np.zeros(len(sequences))
    for back in range(1, int(counts.max()) + 1):
        live = np.flatnonzero(counts >= back)
        at = generated[stops[live] - back]
        surprise = rewards[at] + gamma * following[live] - values[at]
        ahead[live] = surprise + gamma * gae_lambda * ahead[live]
        advantages[at], following[live] = ahead[live], values[at]
    return advantages


def last_generated(sequences: TrainingSequences) -> np.ndarray:
    """[S] position of each sequence's last generated token in the token arrays."""
    stops = np.cumsum(np.add.reduceat(sequences.loss_mask.astype(np.int64), sequences.offsets[:-1]))
    return np.flatnonzero(sequences.loss_mask)[stops - 1]


def last_sequences(groups: Groups) -> np.ndarray:
    """[S] index of the last sequence of each sequence's rollout."""
    last = np.zeros(len(groups.rollout_rewards), dtype=np.int64)
    np.maximum.at(last, groups.rollout_of_sequence, np.arange(len(groups.rollout_of_sequence)))
    return last[groups.rollout_of_sequence]
