"""Statistics of a group's rewards: spread, without which it is not trained on, and pass@k.

Invariant: spread belongs to a whole group and never to one of its rollouts. Measured over the others of a rollout, the single
right answer among wrong ones would have none, and would be the one to be filtered out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from roundhouse.trajectories.records import Rollout, Status

SPREAD_TOLERANCE = 1e-9
"""Rewards of a group that differ by less (relative to the largest, at least 1) count as equal: it is rounding."""


def groups_with_spread(rollouts: Iterable[Rollout]) -> list[str]:
    """Group ids in order of first appearance; failed and masked rollouts do not count."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        own = rewards.setdefault(rollout.group_id, [])
        if rollout.status in (Status.COMPLETED, Status.TRUNCATED) and rollout.reward is not None:
            own.append(rollout.reward)
    return [group for group, values in rewards.items() if values and has_spread(values)]


def has_spread(rewards: list[float]) -> bool:
    """Whether the rewards (at least one) are not all equal."""
    highest, lowest = max(rewards), min(rewards)
    return highest - lowest > SPREAD_TOLERANCE * max(1.0, abs(highest), abs(lowest))


def pass_at_k(rollouts: int, passed: int, k: int) -> float:
    """Probability that at least one of k rollouts passes, from `passed` of `rollouts`: 1 − C(n − c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1).
    """
    if not 1 <= k <= rollouts:
        raise ValueError(f"pass@{k} of {rollouts} rollouts: k must be between 1 and their number")
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)
