"""From the rewards of sequences to what an advantage is made of: shaping, the KL in the reward, and group statistics.

Invariants:
* Shaping never changes what is recorded: the environment's reward stays on the sequence, decides which groups have spread, and
  is what `reward` reports. All sequences of a rollout get the same correction.
* Sequences are averaged per rollout, rollouts per group. A rollout counts once in its group, however many sequences it was
  split into, and a group is what carries the same explicit `group_id`, never what happens to have the same prompt.
* The KL in the reward is a constant of the sampled tokens: no gradient runs through it (`loss.reference_kl` has the one that
  carries a gradient). Its coefficient follows from the iteration before and from what that one measured; it is stored in the
  trainer's cursor, so that a resumed run continues with it.

    rewards 0 1 1, scaling [0, 1] -> [-1, 1], the last one truncated with factor 0      ->  -1  1  0

    group  rollout  sequence rewards    rollout reward    group mean
    g      a        1, 1, 1             1                 (1 + 0) / 2 = 0.5
    g      b        0                   0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from roundhouse.config.objectives import AdaptiveKL, OverlongShaping, RewardShaping, Scaling
from roundhouse.errors import DataError
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.loss import KL_INPUT_CLAMP, KL_OUTPUT_CLAMP
from roundhouse.trajectories.group_statistics import SPREAD_TOLERANCE


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


def shape_rewards(sequences: TrainingSequences, shaping: RewardShaping) -> np.ndarray:
    """[S] float64 rewards after scaling, the factor of truncated rollouts and the overlong penalty, in this order.

    Raises:
        DataError: a reward lies outside of the scaling's source, and that does not clamp.
    """
    rewards = sequences.rewards
    if shaping.scaling is not None:
        low, high = shaping.scaling.source
        outside = np.flatnonzero((rewards < low) | (rewards > high))
        if shaping.scaling.outside == "refuse" and len(outside):
            first = outside[0]
            raise DataError(
                f"sequence {sequences.sequence_ids[first]!r} has the reward {rewards[first]:g}, outside of "
                f"train.algorithm.reward.scaling.source [{low:g}, {high:g}] ({len(outside)} of {len(sequences)} sequences). "
                "Set source to the range of the environment's rewards, outside to clamp, or leave scaling out."
            )
        rewards = scale(rewards, shaping.scaling)
    if shaping.truncated_factor is not None:
        rewards = np.where(sequences.truncated, shaping.truncated_factor * rewards, rewards)
    if shaping.overlong is not None:
        rewards = rewards + overlong_penalties(sequences.generated_tokens, shaping.overlong)
    return rewards


def scale(rewards: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Clamp to the source range, then map it linearly to the target range."""
    (low, high), (start, end) = scaling.source, scaling.target
    return start + (np.clip(rewards, low, high) - low) * (end - start) / (high - low)


def overlong_penalties(generated_tokens: np.ndarray, shaping: OverlongShaping) -> np.ndarray:
    """[S] penalties, 0 up to `limit - buffer` tokens, then linear, and `-penalty` from the limit on.

    DAPO (arXiv 2503.14476), equation 13. The length is the whole rollout's, not that of its first answer, and the penalty has
    a floor: a rollout twice as long as the limit is no worse than one at it.
    """
    beyond = generated_tokens - (shaping.max_generated_tokens - shaping.buffer_tokens)
    return -np.clip(beyond / shaping.buffer_tokens, 0.0, 1.0) * shaping.penalty


MAX_RELATIVE_ERROR = 0.2
"""The adaptive controller moves by at most this share a horizon, however far the KL is from its target."""


def sampled_kl(old: np.ndarray, reference: np.ndarray, estimator: Literal["k1", "k2", "k3"]) -> np.ndarray:
    """[T] KL(policy ‖ reference) at each token, clamped like the loss's; with d = reference − old: −d, d²/2, exp(d) − 1 − d."""
    d = np.clip(reference.astype(np.float64) - old, -KL_INPUT_CLAMP, KL_INPUT_CLAMP)
    values = {"k1": lambda: -d, "k2": lambda: d**2 / 2, "k3": lambda: np.expm1(d) - d}[estimator]()
    return np.clip(values, -KL_OUTPUT_CLAMP, KL_OUTPUT_CLAMP)


def to_go(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[T] sum from each token to the end of its sequence.

    Example: sequences [1 2 3 | 4 5] give [6 5 3 | 9 5].
    """
    ahead = np.cumsum(values[::-1])[::-1]
    after = np.append(ahead, 0.0)[offsets[1:]]
    return ahead - np.repeat(after, np.diff(offsets))


def next_coefficient(coefficient: float, measured: float, rollouts: int, controller: AdaptiveKL | None) -> float:
    """The coefficient after an iteration that measured this KL a token, on this many rollouts.

    Ziegler et al., arXiv 1909.08593, section 2.2. Without a controller it stays.
    """
    if controller is None:
        return coefficient
    error = min(max(measured / controller.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * (1 + error * rollouts / controller.horizon)
