"""Group statistics of rewards, in two stages: sequences are averaged per rollout, rollouts per group.

Invariant: a rollout counts once in its group, however many sequences it was split into, and a group is what carries the
same explicit `group_id`, never what happens to have the same prompt.

    group  rollout  sequence rewards    rollout reward    group mean
    g      a        1, 1, 1             1                 (1 + 0) / 2 = 0.5
    g      b        0                   0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.spread import SPREAD_TOLERANCE


@dataclass(frozen=True, slots=True)
class Groups:
    """S sequences of R rollouts in G groups, numbered in order of first appearance."""

    group_ids: list[str]
    rollout_of_sequence: np.ndarray
    """[S] int."""
    group_of_sequence: np.ndarray
    """[S] int."""
    group_of_rollout: np.ndarray
    """[R] int."""
    rollout_rewards: np.ndarray
    """[R] float64: mean reward of the rollout's sequences."""
    sizes: np.ndarray
    """[G] int: rollouts of each group."""
    means: np.ndarray
    """[G] float64: mean of the rollouts' rewards."""
    stds: np.ndarray
    """[G] float64: their sample standard deviation (divisor n - 1); 0 for a group of one."""
    has_spread: np.ndarray
    """[G] bool: the rollouts' rewards are not all equal. Only such a group can teach anything."""

    @classmethod
    def of(cls, sequences: TrainingSequences, rewards: np.ndarray | None = None) -> Groups:
        """Statistics over `rewards` ([S] float64), by default those of `sequences`."""
        rollouts, rollout_of_sequence = _number(sequences.rollout_ids)
        groups, group_of_sequence = _number(sequences.group_ids)
        group_of_rollout = np.zeros(len(rollouts), dtype=np.int64)
        group_of_rollout[rollout_of_sequence] = group_of_sequence
        given = sequences.rewards if rewards is None else rewards
        rewards = _means(given, rollout_of_sequence, len(rollouts))
        sizes = np.bincount(group_of_rollout, minlength=len(groups))
        means = _means(rewards, group_of_rollout, len(groups))
        squares = np.bincount(group_of_rollout, (rewards - means[group_of_rollout]) ** 2, minlength=len(groups))
        highest = np.full(len(groups), -np.inf)
        lowest = np.full(len(groups), np.inf)
        np.maximum.at(highest, group_of_rollout, rewards)
        np.minimum.at(lowest, group_of_rollout, rewards)
        largest = np.maximum(1.0, np.maximum(np.abs(highest), np.abs(lowest)))
        return cls(
            group_ids=groups,
            rollout_of_sequence=rollout_of_sequence,
            group_of_sequence=group_of_sequence,
            group_of_rollout=group_of_rollout,
            rollout_rewards=rewards,
            sizes=sizes,
            means=means,
            stds=np.sqrt(squares / np.maximum(sizes - 1, 1)),
            has_spread=highest - lowest > SPREAD_TOLERANCE * largest,
        )

    def of_sequences(self, values: np.ndarray) -> np.ndarray:
        """[S] from [G]: each sequence's group's value."""
        return values[self.group_of_sequence]

    def per_rollout(self, values: np.ndarray) -> np.ndarray:
        """[R] from [S]: the mean over each rollout's sequences."""
        return _means(values, self.rollout_of_sequence, len(self.rollout_rewards))

    def totals(self, values: np.ndarray) -> np.ndarray:
        """[S] from [S]: the sum over all sequences of the same rollout."""
        return np.bincount(self.rollout_of_sequence, values, minlength=len(self.rollout_rewards))[
            self.rollout_of_sequence
        ]

    def percentages(self) -> dict[str, float]:
        """Shares of the groups in percent: all rewards 0, all 1, all equal to something else, and mixed."""
        flat = ~self.has_spread
        zero = flat & (np.abs(self.means) <= SPREAD_TOLERANCE)
        one = flat & (np.abs(self.means - 1) <= SPREAD_TOLERANCE)
        return {
            "baseline_reward/pct_0": 100 * float(zero.mean()),
            "baseline_reward/pct_1": 100 * float(one.mean()),
            "baseline_reward/pct_flat": 100 * float((flat & ~zero & ~one).mean()),
            "baseline_reward/pct_mixed": 100 * float(self.has_spread.mean()),
        }


def _number(names: list[str]) -> tuple[list[str], np.ndarray]:
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return list(index), np.array([index[name] for name in names], dtype=np.int64)


def _means(values: np.ndarray, owners: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(owners, values, minlength=count) / np.bincount(owners, minlength=count)
