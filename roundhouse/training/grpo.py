"""GRPO's advantage: how much better a rollout was than the rollouts of the same task.

Invariant: within a group the rollouts' advantages sum to zero, and a group whose rewards are all equal has no weight at
all: it is not trained on (neither policy, KL nor entropy term) and counts in no denominator, so the step is the mean over
what was trained. With reward r, group mean m, sample standard deviation s and size n:

    A = r − m                                    DeepSeekMath, arXiv 2402.03300
    A = (r − m) · n / (n − 1)                    leave_one_out: r minus the mean of the others (RLOO, 2402.14740)
    A / (s + 1e-6)                               normalize_by_std; without it, Dr. GRPO's advantage (2503.20783)

The spread is always the whole group's. Taking it over the others only (as leave-one-out sometimes is done) makes it zero
for the single right answer among wrong ones, which then is sharpened by nothing or by infinity.
"""

from __future__ import annotations

import numpy as np

from roundhouse.config.models import GRPO
from roundhouse.training.algorithm import LossSettings, Stamp, TokenColumns
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.groups import Groups

STD_EPSILON = 1e-6


class GroupRelative:
    """GRPO, and by its switches RLOO's and Dr. GRPO's advantage; DAPO's token-level loss with independent clip bounds."""

    def __init__(self, config: GRPO) -> None:
        self.config = config

    @property
    def loss(self) -> LossSettings:
        config = self.config
        return LossSettings(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            kl_estimator=config.kl_estimator,
            aggregation=config.loss_aggregation,
            mismatch_correction=config.mismatch_correction,
            mismatch_bounds=config.mismatch_bounds,
        )

    @property
    def needs_reference(self) -> bool:
        return self.config.kl_coefficient > 0

    def stamp(self, sequences: TrainingSequences) -> Stamp:
        groups = Groups.of(sequences)
        baselines = self._baselines(sequences, groups)
        advantages = self._advantages(sequences, groups, baselines)
        teaches = groups.has_spread[groups.group_of_sequence]
        weights = np.where(np.repeat(teaches, sequences.lengths) & sequences.loss_mask, np.float32(1), np.float32(0))
        columns = TokenColumns(
            advantages=np.repeat(advantages, sequences.lengths).astype(np.float32) * weights,
            policy_weights=weights,
            reference_kl_weights=weights * np.float32(self.config.kl_coefficient),
            entropy_weights=weights * np.float32(self.config.entropy_coefficient),
        )
        return Stamp(
            columns=columns,
            metrics={**_reward_metrics(sequences, groups), **_advantage_metrics(advantages)},
            sequence_columns={"advantage": advantages, "baseline": baselines},
        )

    def _baselines(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        means, sizes = groups.means[groups.group_of_sequence], groups.sizes[groups.group_of_sequence]
        if not self.config.leave_one_out:
            return means
        own = groups.rollout_rewards[groups.rollout_of_sequence]
        others = (means * sizes - own) / np.maximum(sizes - 1, 1)
        return np.where(sizes > 1, others, own)

    def _advantages(self, sequences: TrainingSequences, groups: Groups, baselines: np.ndarray) -> np.ndarray:
        advantages = sequences.rewards - baselines
        if self.config.normalize_by_std:
            advantages = advantages / (groups.stds[groups.group_of_sequence] + STD_EPSILON)
        return np.where(groups.has_spread[groups.group_of_sequence], advantages, 0.0)


def _reward_metrics(sequences: TrainingSequences, groups: Groups) -> dict[str, float]:
    return {
        "reward": float(groups.rollout_rewards.mean()),
        "num_groups": float(len(groups.sizes)),
        "num_rollouts": float(len(groups.rollout_rewards)),
        "num_sequences": float(len(sequences)),
        "group_size_min": float(groups.sizes.min()),
        **groups.percentages(),
    }


def _advantage_metrics(advantages: np.ndarray) -> dict[str, float]:
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/max": float(advantages.max()),
        "advantages/min": float(advantages.min()),
    }
