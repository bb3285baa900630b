"""What happens to rewards before they become advantages.

Invariant: shaping never touches what is recorded: the environment's reward stays on the sequence, decides which groups have
spread, and is what `reward` reports. All sequences of a rollout get the same correction.

    rewards 0 1 1, scaling [0, 1] -> [-1, 1], the last one truncated with factor 0      ->  -1  1  0
"""

from __future__ import annotations

import numpy as np

from roundhouse.config.objectives import OverlongShaping, RewardShaping, Scaling
from roundhouse.errors import DataError
from roundhouse.training.batch import TrainingSequences


def shape_rewards(sequences: TrainingSequences, shaping: RewardShaping) -> np.ndarray:
    """[S] float64 rewards after scaling, the factor of truncated rollouts and the overlong penalty, in this order.

    Raises:
        DataError: a reward lies outside of the scaling's source, and that does not clamp.
    """
    rewards = sequences.rewards
    if shaping.scaling is not None:
        _refuse_outside(sequences, shaping.scaling)
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


def _refuse_outside(sequences: TrainingSequences, scaling: Scaling) -> None:
    low, high = scaling.source
    outside = np.flatnonzero((sequences.rewards < low) | (sequences.rewards > high))
    if scaling.outside == "refuse" and len(outside):
        first = outside[0]
        raise DataError(
            f"sequence {sequences.sequence_ids[first]!r} has the reward {sequences.rewards[first]:g}, outside of "
            f"train.algorithm.reward.scaling.source [{low:g}, {high:g}] ({len(outside)} of {len(sequences)} sequences). Set "
            "source to the range of the environment's rewards, outside to clamp, or leave scaling out."
        )
