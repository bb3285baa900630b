"""What a finite evaluation says of a policy: estimates with their intervals. Pure functions of rewards.

Invariant: tasks are independent and the rollouts of one task are one cluster, so every interval is over tasks; the same
rewards always give the same interval.

    {"a": [1, 0], "b": [1, 1]}     mean 0.75     pass@1 0.75     pass@2 1.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundhouse.trajectories.group_statistics import pass_at_k

RESAMPLES = 2000
"""Bootstrap samples: the ends of a 95 % interval then move by about a tenth of the standard error from seed to seed."""

ROUNDING = 1e-9
"""A reward that misses the threshold by less reaches it: 0.7 + 0.2 + 0.1 is not quite 1."""

Rewards = Mapping[str, Sequence[float]]
"""Rewards of a task's rollouts, by task. Failed rollouts have none and are not in it."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the interval that holds the true value with the confidence asked for."""

    value: float
    low: float
    high: float


def mean_pass_at_k(rewards: Rewards, k: int, threshold: float = 1.0) -> float:
    """Mean of `pass_at_k` over the tasks that have k rollouts; a rollout passes when its reward is at least the threshold."""
    enough = [task for task in rewards.values() if len(task) >= k]
    if not enough:
        raise ValueError(f"pass@{k}: no task has {k} rollouts with a reward")
    least = threshold - ROUNDING * max(1.0, abs(threshold))
    return math.fsum(pass_at_k(len(task), sum(reward >= least for reward in task), k) for task in enough) / len(enough)


def reported_ks(rewards: Rewards) -> list[int]:
    """Powers of two up to the rollouts that every task has."""
    fewest = min((len(task) for task in rewards.values()), default=0)
    return [2**power for power in range(fewest.bit_length()) if 2**power <= fewest]


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of one value a task, with its percentile bootstrap interval over tasks (Efron 1979).

    A value that is the same for every task gives an interval of no width, which says nothing of tasks not seen: with n
    tasks that all passed, up to about 3 / n may still fail.
    """
    data = np.asarray(values, dtype=np.float64)
    if len(data) == 0:
        raise ValueError("an interval needs at least one task")
    draws = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    means = data[draws].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(data.mean()), float(low), float(high))


def task_means(rewards: Rewards) -> dict[str, float]:
    """Mean reward of each task."""
    return {task: math.fsum(values) / len(values) for task, values in rewards.items() if values}


def paired_difference(candidate: Rewards, incumbent: Rewards, confidence: float = 0.95) -> Interval:
    """How much better the candidate is, over the tasks that both have rewards for.

    Both answered the same tasks, so the difference is taken task by task: what makes a task hard cancels.

    Raises:
        ValueError: they have no task in common.
    """
    ours, theirs = task_means(candidate), task_means(incumbent)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ValueError("the two evaluations have no task in common")
    return mean_interval([ours[task] - theirs[task] for task in common], confidence)
