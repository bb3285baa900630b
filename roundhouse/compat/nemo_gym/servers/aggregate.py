"""Statistics of verified rollouts, as /aggregate_metrics answers them; pure functions.

Invariant: each statistic is over the rollouts that report the field, of which a truth value counts as 0 or 1. `std` is the
sample's (n-1); a single rollout's is 0, and of a field that only one of several rollouts reports there is none.

    [{"reward": 1, "_ng_task_index": 0}, {"reward": 0, "_ng_task_index": 0}]
        ->  agent_metrics {"mean/reward": 0.5, "max/reward": 1, …}, key_metrics {"mean/reward": 0.5}, one group

Fields are the numbers at the top of a row, of its token usage, and of `metrics` and `reward_components` where it has them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Metrics = dict[str, Any]
ComputeMetrics = Callable[[list[list[Row]]], Metrics]
"""From rollouts by task to more metrics; `per_task_metrics` among them, a list of rows with `_ng_task_index`, joins the
groups."""
KeyMetrics = Callable[[Metrics], Metrics]
"""From all metrics to those that a person reads first."""

TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"
_OWN_FIELDS = ("metrics", "reward_components")


def aggregate_metrics(
    verify_responses: Sequence[Row],
    compute_metrics: ComputeMetrics | None = None,
    key_metrics: KeyMetrics | None = None,
) -> Metrics:
    """Statistics over all rollouts and over each task's. Rows without `_ng_task_index` are told apart by `task_id`."""
    if not verify_responses:
        return {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
    tasks = rollouts_by_task(verify_responses)
    groups = [group_metrics(rollouts, expected=len(rollouts)) for rollouts in tasks]
    agent_metrics: Metrics = dict(describe(verify_responses))
    if compute_metrics is not None:
        extra = dict(compute_metrics(tasks))
        _join_tasks(groups, extra.pop("per_task_metrics", None) or [])
        agent_metrics |= extra
    select = key_metrics or means
    return {"group_level_metrics": groups, "agent_metrics": agent_metrics, "key_metrics": select(agent_metrics)}


def rollouts_by_task(rows: Iterable[Row]) -> list[list[Row]]:
    """Rollouts grouped by task: by ascending index, then those that only have a `task_id`, as they come."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get(TASK, row.get("task_id")), []).append(row)
    return [groups[key] for key in sorted(groups, key=lambda key: (0, key) if isinstance(key, int) else (1, 0))]


def group_metrics(rollouts: Sequence[Row], expected: int, sample: Row | None = None) -> Metrics:
    """One task's entry of group_level_metrics.

    Args:
        expected: how many rollouts of the task were asked for.
        sample: the task's row; where nobody knows it, the rollouts' agent stands there.
    """
    first = rollouts[0]
    identity = {name: first[name] for name in (TASK, "task_id") if name in first}
    ordered = sorted(enumerate(rollouts), key=lambda pair: pair[1].get(ROLLOUT, pair[0]))
    return {
        **identity,
        **describe(rollouts),
        "sample": sample if sample is not None else {"agent_ref": {"name": "agent"}},
        "num_rollouts": len(rollouts),
        "expected_num_rollouts": expected,
        "missing_num_rollouts": expected - len(rollouts),
        "reward_profile_completion_pct": 100.0 * len(rollouts) / expected if expected else 100.0,
        "rollout_infos": [_rollout_info(row, row.get(ROLLOUT, place)) for place, row in ordered],
    }


def describe(rows: Sequence[Row]) -> dict[str, float]:
    """mean, max, min, median and std of each field, named `<statistic>/<field>`."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in numbers(row).items():
            columns.setdefault(name, []).append(value)
    described: dict[str, float] = {}
    for name, values in columns.items():
        mean = sum(values) / len(values)
        described |= {
            f"mean/{name}": mean,
            f"max/{name}": max(values),
            f"min/{name}": min(values),
            f"median/{name}": _median(values),
        }
        if len(values) > 1 or len(rows) == 1:
            described[f"std/{name}"] = _deviation(values, mean)
    return {name: value for name, value in described.items() if math.isfinite(value)}


def numbers(row: Row) -> dict[str, float]:
    """The fields of a rollout that statistics are made of. Bookkeeping (`_ng_…`) is none of them."""
    parts: list[tuple[str, Row]] = []  # of one name twice, the later counts
    for name in _OWN_FIELDS:
        if isinstance(own := row.get(name), Mapping):
            parts.append(("" if name == "metrics" else f"{name}/", own))
    parts += [("", row), ("", _usage(row))]
    return {
        f"{prefix}{name}": int(value) if isinstance(value, bool) else value
        for prefix, fields in parts
        for name, value in fields.items()
        if isinstance(value, int | float) and not name.startswith("_ng_")
    }


def means(metrics: Metrics) -> Metrics:
    """The `mean/…` among the metrics: what a person reads first unless an environment says otherwise."""
    return {name: value for name, value in metrics.items() if name.startswith("mean/")}


def light(row: Row) -> Metrics:
    """A rollout as it is sent to /aggregate_metrics: without conversation and captures, its token usage kept."""
    heavy = ("response", "responses_create_params", "ng_agent_observations", "ng_model_call_capture", "ng_trajectory")
    kept = {name: value for name, value in row.items() if name not in heavy and name != "_roundhouse"}
    usage = _usage(row)
    return {**kept, "response": {"usage": usage}} if usage else kept


def expected_by_task(rows: Iterable[Row]) -> Counter[Any]:
    """How many rollouts of each task index were asked for."""
    return Counter(row[TASK] for row in rows)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _deviation(values: Sequence[float], mean: float) -> float:
    # Products, unlike powers, become infinite instead of raising.
    return math.sqrt(sum((value - mean) * (value - mean) for value in values) / max(1, len(values) - 1))


def _usage(row: Row) -> Row:
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    return usage if isinstance(usage, Mapping) else {}


def _rollout_info(row: Row, rollout_index: Any) -> Metrics:
    task = row.get(TASK, row.get("task_id", ""))
    indexes = {name: row[name] for name in (TASK, ROLLOUT) if name in row}
    return {"rollout_id": f"{task}:{rollout_index}", **indexes, **numbers(row)}


def _join_tasks(groups: list[Metrics], per_task: Iterable[Row]) -> None:
    by_index = {row[TASK]: row for row in per_task}
    for group in groups:
        group |= by_index.get(group.get(TASK), {})
