"""Numbers of a set of rollouts, by stable names.

Denominators: `reward/*` over rewarded rollouts (failed ones have none); `rollout/*` over rollouts that made at least one
model call; rates over all requested ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from roundhouse.trajectories.records import Rollout, Status


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Reward, lengths and outcome rates."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    started = [rollout for rollout in rollouts if rollout.turns]
    generated = [sum(len(turn.generation_token_ids) for turn in rollout.turns) for rollout in started]
    total = [rollout.turns[-1].prompt_length + len(rollout.turns[-1].generation_token_ids) for rollout in started]
    metrics: dict[str, float] = {}
    if rewards:
        metrics |= {
            "reward/mean": mean(rewards),
            "reward/std": deviation(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }
    if started:
        metrics |= {
            "rollout/turns_mean": mean([len(rollout.turns) for rollout in started]),
            "rollout/generated_tokens_mean": mean(generated),
            "rollout/generated_tokens_max": max(generated),
            "rollout/total_tokens_mean": mean(total),
            "rollout/total_tokens_max": max(total),
            "rollout/generated_tokens": float(sum(generated)),
            "rollout/seconds_mean": mean([rollout.seconds for rollout in started]),
            "rollout/seconds_max": max(rollout.seconds for rollout in started),
            "rollout/generation_seconds_mean": mean([rollout.generation_seconds for rollout in started]),
            "rollout/environment_seconds_mean": mean([rollout.environment_seconds for rollout in started]),
        }
    if rollouts:
        for status in Status:
            metrics[f"rollout/{status.value}_rate"] = mean([float(rollout.status is status) for rollout in rollouts])
    return metrics | _failure_metrics(rollouts) | _environment_metrics(rollouts)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))


def _failure_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many rollouts failed, by kind and by code."""
    failed = [rollout for rollout in rollouts if rollout.status is Status.FAILED]
    kinds = Counter(f"failures/{rollout.failure_kind or 'unknown'}" for rollout in failed)
    codes = Counter(f"failures/code/{rollout.failure_code or 'unknown'}" for rollout in failed)
    return {name: float(count) for name, count in sorted((kinds + codes).items())}


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means of what the environment reported, each over the rollouts that report it."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found.setdefault(f"environment/{name}", []).append(value)
        for name, value in rollout.reward_components.items():
            found.setdefault(f"reward/{name}", []).append(value)
    return {name: mean(values) for name, values in sorted(found.items())}
