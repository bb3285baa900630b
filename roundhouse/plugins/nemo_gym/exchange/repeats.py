"""Statistics of each repeat (the i-th rollout of every task), and of their spread over repeats; pure functions.

Invariant: a repeat's statistics are over the tasks that it has; names and values equal NeMo Gym's (from 0.6). They are
omitted for an agent with one repeat.

    {"_ng_rollout_index": 0, "sample_count": 40, "missing_count": 0, "mean/reward": 0.5, "sem/reward": 0.08, …}
        ->  mean_across_repeats/mean/reward, std_across_repeats/mean/reward, …

`ci_low_95` and `ci_high_95` bound the mean by Student's t: mean ± t(0.975, n-1) · std / √n.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundhouse.plugins.nemo_gym.exchange.json_lines import ROLLOUT, TASK

Metrics = dict[str, Any]
RepeatMetrics = Callable[[list[list[Mapping[str, Any]]]], Metrics]
"""From one repeat's rollouts by task to more metrics of it."""

SAMPLES, MISSING = "sample_count", "missing_count"
ACROSS = "_across_repeats/"
CONFIDENCE = 0.95
_NO_ESTIMATE_PREFIXES = tuple(
    f"{name}/"
    for name in ("max", "min", "median", "std", "sem", "se", "p25", "p75", "ci_low_95", "ci_high_95", "histogram")
)
_NO_ESTIMATE_SUFFIXES = (
    *(f"/{name}" for name in ("max", "min", "median", "p5", "p25", "p75", "p95", "ci_low_95", "ci_high_95")),
    *("/ci_lower", "/ci_upper", "_ci_lower", "_ci_upper", "_ci95_lower", "_ci95_upper", "/_ng_attempt_index"),
    *(f"/{name}" for name in ("std_dev_across_runs", "std_err_across_runs", "avg_sample_std_dev")),
)
_BOOKKEEPING = frozenset({TASK, ROLLOUT, "_ng_attempt_index", SAMPLES, MISSING, "num_repeats", "token_usage_version"})


def repeat_level_metrics(
    rows: Sequence[Mapping[str, Any]], numbers: Callable[[Mapping[str, Any]], Mapping[str, float]]
) -> list[Metrics]:
    """Return an entry for each repeat, in order; an empty list for fewer than two.

    Args:
        rows: rollouts of one agent that were judged and not masked.
        numbers: returns the fields of a rollout that statistics are made of.
    """
    by_repeat: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_repeat.setdefault(row.get(ROLLOUT, 0), []).append(row)
    if len(by_repeat) < 2:
        return []
    tasks = len({_task(row) for row in rows})
    entries = []
    for repeat, own in sorted(by_repeat.items()):
        present = len({_task(row) for row in own})
        entry: Metrics = {ROLLOUT: repeat, SAMPLES: present, MISSING: tasks - present}
        columns: dict[str, list[float]] = {}
        for row in own:
            for name, value in numbers(row).items():
                columns.setdefault(name, []).append(value)
        for name, values in columns.items():
            entry |= {f"{statistic}/{name}": value for statistic, value in _spread(values, "sem").items()}
            entry |= {f"p{percent}/{name}": _quantile(values, percent / 100) for percent in (25, 75)}
        entries.append(entry)
    return entries


def across_repeats(repeats: Sequence[Metrics]) -> Metrics:
    """Return the statistics of each estimate (`mean/…`, and metrics of an environment's own) over the repeats."""
    names = dict.fromkeys(name for repeat in repeats for name in repeat if is_estimate(name))
    metrics: Metrics = {}
    for name in names:
        values = [repeat[name] for repeat in repeats if _is_finite(repeat.get(name))]
        if values:
            metrics |= {f"{statistic}{ACROSS}{name}": value for statistic, value in _spread(values, "se").items()}
    return metrics


def add_own_metrics(
    repeats: list[Metrics],
    agent_metrics: Metrics,
    own_metrics: Metrics,
    rows: Sequence[Mapping[str, Any]],
    compute: RepeatMetrics,
) -> None:
    """Compute an environment's metrics for each repeat, in place of general ones of the same name, and their spread.

    A metric counts if it is finite in every repeat, and in the whole collection if it is computed there.

    Args:
        own_metrics: the environment's metrics of the whole collection.
    """
    by_repeat: dict[int, dict[Any, list[Mapping[str, Any]]]] = {}
    for row in rows:
        by_repeat.setdefault(row.get(ROLLOUT, 0), {}).setdefault(_task(row), []).append(row)
    computed = [
        compute([own[task] for task in sorted(own, key=lambda key: (isinstance(key, str), key))])
        for own in (by_repeat[repeat[ROLLOUT]] for repeat in repeats)
    ]
    names = {name for metrics in computed for name in metrics}
    for name in names:
        values = [metrics.get(name) for metrics in computed]
        usable = name not in own_metrics or _is_finite(own_metrics[name])
        for repeat, value in zip(repeats, values, strict=True):
            repeat.pop(name, None)
            if usable and all(map(_is_finite, values)):
                repeat[name] = float(value)  # type: ignore[arg-type]
    for name in [name for name in agent_metrics if name.partition(ACROSS)[2] in names]:
        del agent_metrics[name]
    agent_metrics |= across_repeats(repeats)


def is_estimate(name: str) -> bool:
    """Return True for a point estimate; False for spread, bounds and bookkeeping."""
    return (
        name not in _BOOKKEEPING
        and not name.startswith(_NO_ESTIMATE_PREFIXES)
        and not name.endswith(_NO_ESTIMATE_SUFFIXES)
        and ACROSS not in name
    )


def _spread(values: Sequence[float], error_name: str) -> Metrics:
    """Return the finite ones of mean, median, std, its error, min, max and, of several values, the bounds of the mean."""
    from scipy.special import stdtrit  # 0.2 s to import, and most rollouts are played without statistics

    count = len(values)
    mean = sum(values) / count  # not fmean, which raises if the sum is above the largest float
    deviation = math.sqrt(sum((value - mean) * (value - mean) for value in values) / max(1, count - 1))
    error = deviation / math.sqrt(count)
    spread: Metrics = {
        "mean": mean,
        "median": float(statistics.median(values)),
        "std": deviation,
        error_name: error,
        "min": float(min(values)),
        "max": float(max(values)),
    }
    if count > 1:
        reach = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
        spread |= {"ci_low_95": mean - reach, "ci_high_95": mean + reach}
    return {name: value for name, value in spread.items() if math.isfinite(value)}


def _quantile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two values at the share, as pandas does."""
    ordered = sorted(values)
    below, part = divmod(share * (len(ordered) - 1), 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return float(low + (high - low) * part)


def _task(row: Mapping[str, Any]) -> Any:
    return row.get("task_id", 0) if row.get(TASK) is None else row[TASK]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
