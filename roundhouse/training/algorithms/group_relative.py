"""GRPO's advantage and its relatives': how much better a rollout was than the rollouts of the same task.

Invariant: within a group the rollouts' advantages sum to zero, and a group whose rewards are all equal has no weight at
all: it is not trained on (neither policy, KL nor entropy term) and counts in no denominator, so the step is the mean over
what was trained. With reward r, group mean m, sample standard deviation s and size n:

    A = r − m                                    DeepSeekMath, arXiv 2402.03300
    A = (r − m) · n / (n − 1)                    leave_one_out: r minus the mean of the others (RLOO, 2402.14740)
    A / (s + 1e-6)                               normalize_by_std; without it, Dr. GRPO's advantage (2503.20783)

The spread is always the whole group's. Taking it over the others only (as leave-one-out sometimes is done) makes it zero
for the single right answer among wrong ones, which then is sharpened by nothing or by infinity.

The kinds grpo, dr_grpo, rloo, dapo, gspo and cispo differ in these two switches and in the constants of the loss.
"""

from __future__ import annotations

import numpy as np

from roundhouse.config.algorithms import GroupRelativeConfig
from roundhouse.training.algorithms import register
from roundhouse.training.algorithms.policy_gradient import PolicyGradientAlgorithm, Rewards
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.rewards import Groups

STD_EPSILON = 1e-6


@register(GroupRelativeConfig)
class GroupRelative(PolicyGradientAlgorithm):
    """The reward against the group's."""

    def __init__(self, config: GroupRelativeConfig) -> None:
        super().__init__(config)
        self.leave_one_out, self.normalize_by_std = config.leave_one_out, config.normalize_by_std

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        return group_advantages(rewards.values, groups, self.leave_one_out, self.normalize_by_std)

    def baselines(self, groups: Groups) -> np.ndarray:
        return group_baselines(groups, self.leave_one_out)


def group_baselines(groups: Groups, leave_one_out: bool) -> np.ndarray:
    """[S] mean of the group, or of the others in it (a rollout alone is its own baseline)."""
    means, sizes = groups.of_sequences(groups.means), groups.of_sequences(groups.sizes)
    if not leave_one_out:
        return means
    own = groups.rollout_rewards[groups.rollout_of_sequence]
    others = (means * sizes - own) / np.maximum(sizes - 1, 1)
    return np.where(sizes > 1, others, own)


def group_advantages(rewards: np.ndarray, groups: Groups, leave_one_out: bool, normalize_by_std: bool) -> np.ndarray:
    """[S] advantages of `rewards` ([S]), of which `groups` holds the statistics; 0 in a group without spread."""
    advantages = rewards - group_baselines(groups, leave_one_out)
    if normalize_by_std:
        advantages = advantages / (groups.of_sequences(groups.stds) + STD_EPSILON)
    return np.where(groups.of_sequences(groups.has_spread), advantages, 0.0)
