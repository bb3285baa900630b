"""Statistics of verified rollouts, as /aggregate_metrics answers them; pure functions.

Invariant: each statistic is over the rollouts that report the field. `std` is the sample's (n-1), 0 for a single value.

    [{"reward": 1, "task_id": "a"}, {"reward": 0, "task_id": "a"}]
        ->  agent_metrics {"mean/reward": 0.5, "max/reward": 1, …}, key_metrics {"mean/reward": 0.5}, one group
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
}
_INDEXES = frozenset({"_ng_task_index", "_ng_rollout_index", "_ng_attempt_index"})
_NESTED = ("metrics", "reward_components")


def aggregate_metrics(verify_responses: Sequence[Row]) -> dict[str, Any]:
    """Statistics over all rollouts and over each task's."""
    groups: dict[str, list[Row]] = {}
    for row in verify_responses:
        groups.setdefault(str(row.get("_ng_task_index", row.get("task_id"))), []).append(row)
    agent_metrics = _statistics(verify_responses)
    return {
        "group_level_metrics": [_group(rows) for rows in groups.values()],
        "agent_metrics": agent_metrics,
        "key_metrics": {name: value for name, value in agent_metrics.items() if name.startswith("mean/")},
    }


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0]
    identity = {name: first[name] for name in ("_ng_task_index", "task_id") if name in first}
    infos = [
        {"rollout_id": f"{next(iter(identity.values()), '')}:{row.get('_ng_rollout_index', index)}"} | _numbers(row)
        for index, row in enumerate(rows)
    ]
    return {**identity, "num_rollouts": len(rows), **_statistics(rows), "rollout_infos": infos}


def _statistics(rows: Sequence[Row]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in _numbers(row).items():
            columns.setdefault(name, []).append(value)
    return {
        f"{statistic}/{name}": compute(values)
        for name, values in columns.items()
        for statistic, compute in _STATISTICS.items()
    }


def _numbers(row: Row) -> dict[str, float]:
    """Top-level numbers, those of metrics and reward components, and token usage."""
    usage = (row.get("response") or {}).get("usage") or {}
    parts: list[tuple[str, Mapping[str, Any]]] = [("", row), ("usage/", usage)]
    parts += [("" if name == "metrics" else f"{name}/", row.get(name) or {}) for name in _NESTED]
    return {
        f"{prefix}{name}": float(value)
        for prefix, fields in parts
        for name, value in fields.items()
        if isinstance(value, int | float) and name not in _INDEXES
    }
