"""Test whether the failures of a collection are distributed at random.

A verifier that raises only for right answers, or a judge that fails for long ones, biases the sample of rollouts that
the policy learns from. A single failure does not show this; all of them together do.

Null hypothesis: a rollout's failure is independent of its outcome, so that each choice of F failed rollouts among N is
equally likely. Each feature has a test:

    task               pairs of failures within a task, against `DRAWS` draws of as many (multivariate hypergeometric)
    successful_calls   rank sum of the failed rollouts (Wilcoxon 1945), two-sided, normal approximation with ties
    turns, tokens      the same for model calls, and for generated tokens

Each probability is multiplied by the number of features (Bonferroni), so that the smallest one can be read alone.
Rollouts without a model call are omitted: they do not have features. The test by task counts only data failures,
because an outage hits the rollouts of its time, which often belong to a few tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roundhouse.trajectories.records import FailureKind, Rollout

FEWEST = 5
"""With fewer failures, or fewer other rollouts, nothing is tested."""
DRAWS = 20_000
FEATURES = ("task", "successful_calls", "turns", "tokens")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rollout with a model call."""

    failure: FailureKind | None
    task: Any
    """Equal for rollouts of one group."""
    successful_calls: float
    """Tool calls that did not fail."""
    turns: int
    tokens: int
    """Generated."""


def outcomes_of(rollouts: Iterable[Rollout]) -> list[Outcome]:
    """Return the outcomes of the rollouts that made a model call."""
    return [
        Outcome(
            each.failure_kind if not each.status.rewarded else None,
            each.group_id,
            successful_calls(each.metrics),
            len(each.turns),
            each.generated_tokens,
        )
        for each in rollouts
        if each.turns
    ]


def successful_calls(metrics: Mapping[str, float]) -> float:
    """Return the number of tool calls that did not fail, from the metrics of the agent loop."""
    bad = metrics.get("agent_tool_failures", 0.0) + metrics.get("agent_invalid_tool_calls", 0.0)
    return metrics.get("agent_tool_calls", 0.0) - bad


def uneven_failures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return by feature the probability that chance spreads the failures at least as unevenly; nothing for a feature that all
    rollouts share, or with fewer than `FEWEST` failures."""
    by_data = [each for each in outcomes if each.failure is not FailureKind.INFRA]
    failed = np.array([each.failure is not None for each in outcomes], bool)
    tests: dict[str, Callable[[], float | None]] = {
        "task": lambda: _by_task([each.failure is not None for each in by_data], [each.task for each in by_data]),
        "successful_calls": lambda: _by_rank(failed, [each.successful_calls for each in outcomes]),
        "turns": lambda: _by_rank(failed, [each.turns for each in outcomes]),
        "tokens": lambda: _by_rank(failed, [each.tokens for each in outcomes]),
    }
    chances = {name: test() for name, test in tests.items()}
    return {name: min(1.0, len(FEATURES) * chance) for name, chance in chances.items() if chance is not None}


def _by_task(failed: Sequence[bool], tasks: Sequence[Any]) -> float | None:
    failures = sum(failed)
    sizes = Counter(tasks)
    if min(failures, len(failed) - failures) < FEWEST or max(sizes.values()) < 2 or len(sizes) < 2:
        return None
    own = Counter(task for task, is_failed in zip(tasks, failed, strict=True) if is_failed)
    pairs = sum(count * (count - 1) for count in own.values())
    possible = sum(size * (size - 1) for size in sizes.values())
    if pairs <= possible * failures * (failures - 1) / (len(failed) * (len(failed) - 1)):
        return 1.0  # no more than the mean of all draws
    generator = np.random.default_rng(0)
    draws = generator.multivariate_hypergeometric(list(sizes.values()), failures, DRAWS, method="count")
    as_uneven = int(((draws * (draws - 1)).sum(axis=1) >= pairs).sum())
    return (1 + as_uneven) / (1 + DRAWS)


def _by_rank(failed: np.ndarray, values: Sequence[float]) -> float | None:
    count, failures = len(failed), int(failed.sum())
    if min(failures, count - failures) < FEWEST:
        return None
    _, place, ties = np.unique(np.array(values, np.float64), return_inverse=True, return_counts=True)
    if len(ties) < 2:
        return None
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    distance = abs(ranks[failed].sum() - failures * (count + 1) / 2)
    spread = failures * (count - failures) / 12 * (count + 1 - (ties**3 - ties).sum() / (count * (count - 1)))
    return math.erfc(max(0.0, distance - 0.5) / math.sqrt(2 * spread))
