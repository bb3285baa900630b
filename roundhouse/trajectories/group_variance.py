"""Which groups can teach: those whose rollouts' rewards are not all equal.

Invariant: spread belongs to a whole group and never to one of its rollouts. Measured over the others of a rollout, the single
right answer among wrong ones would have none, and would be the one to be filtered out.
"""

from __future__ import annotations

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
