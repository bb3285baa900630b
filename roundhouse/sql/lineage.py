"""Lineage: the data of a checkpoint, the uses of a row, and the differences of two runs.

Invariant: every answer comes from manifests and the datasets that they name, so it holds for resumed and forked runs,
and after the deletion of older checkpoints. Version k of a run is trained on iterations 1 to k; of a fork, on its
parent's iterations up to the fork, and then on its own.

    base    1 2 3 4 5                    why wide 7  =  base 1-4, wide 5-7
    wide    · · · └── 5 6 7
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from roundhouse.config.loading import flatten
from roundhouse.errors import StoreError
from roundhouse.sql.database import QueryError, run_query
from roundhouse.store.lineage import read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import no_such_run, run_exists
from roundhouse.store.stage import StageKind

_ROW = "coalesce(json_extract_string(task, '$.task_id'), regexp_replace(group_id, '#[0-9]+$', ''))"
"""The `task_id` of a rollout. The name of a group does not show it: `a#2` is a task, or the second group of the task `a`."""
_USED = f"""
WITH named AS (
  SELECT iteration, sequence_id, rollout_id, policy_version, reward, {_ROW} AS row
  FROM sequences
  LEFT JOIN (SELECT iteration, rollout_id, task FROM rollouts WHERE stage = 'collect') USING (iteration, rollout_id)
  WHERE iteration BETWEEN ? AND ?
), used AS (
  SELECT s.iteration, s.rollout_id, s.row, s.policy_version, s.reward, c.trained, c.trained_tokens
  FROM named s JOIN columns c USING (iteration, sequence_id)
)
"""
_ITERATIONS = (
    _USED
    + """
SELECT iteration, count(*) AS sequences, count(*) FILTER (trained) AS trained_sequences,
       sum(trained_tokens)::BIGINT AS trained_tokens,
       count(DISTINCT rollout_id) FILTER (trained) AS rollouts, count(DISTINCT row) FILTER (trained) AS rows,
       avg(reward) AS reward, list_sort(list(DISTINCT policy_version)) AS policy_versions
FROM used GROUP BY iteration ORDER BY iteration
"""
)
_ROWS = (
    _USED
    + """
SELECT row, list_sort(list(DISTINCT iteration)) AS iterations, count(DISTINCT (iteration, rollout_id)) AS rollouts,
       sum(trained_tokens)::BIGINT AS trained_tokens, avg(reward) AS reward
FROM used WHERE trained GROUP BY row ORDER BY row
"""
)
_PROMPTS = f"""
SELECT {_ROW} AS row, any_value(task) AS task
FROM rollouts WHERE stage = 'collect' AND iteration BETWEEN ? AND ? AND sample = 0 GROUP BY 1
"""
_DATASET_PROMPTS = f"""
SELECT {_ROW} AS row, any_value(task) AS task
FROM dataset_rollouts WHERE dataset = ? AND version = ? AND sample = 0 GROUP BY 1
"""
_STAGES = """
SELECT iteration, stage, seed, code_version, config_digest, policy_version, attempt, inputs['dataset'] AS dataset FROM stages
WHERE iteration BETWEEN ? AND ? AND stage IN ('collect', 'validate', 'train') ORDER BY iteration, stage
"""
_OF_ROW = f"""
SELECT r.run_id, r.iteration, count(DISTINCT r.rollout_id) AS rollouts,
       count(DISTINCT r.rollout_id) FILTER (c.trained) AS trained, sum(c.trained_tokens)::BIGINT AS trained_tokens,
       avg(r.reward) FILTER (r.status IN ('completed', 'truncated')) AS reward,
       list_sort(list(DISTINCT q.reason) FILTER (q.reason IS NOT NULL)) AS refused
FROM (SELECT * FROM rollouts WHERE stage = 'collect' AND {_ROW} = ?) r
LEFT JOIN columns c USING (run_id, iteration, rollout_id)
LEFT JOIN quarantine q USING (run_id, iteration, rollout_id)
GROUP BY 1, 2 ORDER BY 1, 2
"""
_OF_ROW_OFFLINE = """
SELECT s.run_id, s.iteration, count(DISTINCT s.rollout_id) AS rollouts,
       count(DISTINCT s.rollout_id) FILTER (c.trained) AS trained, sum(c.trained_tokens)::BIGINT AS trained_tokens,
       avg(s.reward) AS reward, []::VARCHAR[] AS refused, any_value(t.inputs['dataset']) AS dataset
FROM (SELECT * FROM sequences WHERE group_id = ? OR starts_with(group_id, ?)) s
JOIN (SELECT run_id, iteration, inputs FROM stages WHERE stage = 'validate') t USING (run_id, iteration)
JOIN columns c USING (run_id, iteration, sequence_id)
GROUP BY 1, 2 ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Iterations of one run that a version was trained on."""

    run_id: str
    first: int
    last: int
    note: str = ""
    """Why what came before is not known here."""


@dataclass(slots=True)
class TrainedOn:
    """Training data of a checkpoint."""

    run_id: str
    version: int
    checkpoint: str | None
    """URI; None when retention has deleted it."""
    segments: list[Segment]
    iterations: list[dict[str, Any]] = field(default_factory=list)
    """One entry per iteration: its data, seed, code and configuration, the sampling versions, and the dataset if the
    run did not collect it."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One entry a task row, with its prompt."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def trained_on(store: str, run_id: str, version: int) -> TrainedOn:
    """Return rows, prompts, policy versions, seeds and code of a checkpoint.

    Raises:
        StoreError: the run does not exist, or has not trained this version.
    """
    segments = segments_of(store, run_id, version)
    place = Location(store) / f"runs/{run_id}/checkpoints/{version:06d}"
    result = TrainedOn(run_id, version, place.uri if place.exists("manifest.json") else None, segments)
    by_row: dict[str, dict[str, Any]] = {}
    for segment in reversed(segments):
        if segment.first > segment.last:
            continue
        span = (segment.first, segment.last)
        iterations = _rows(store, segment.run_id, _ITERATIONS, *span)
        stages = _rows(store, segment.run_id, _STAGES, *span)
        result.iterations += [
            {"run_id": segment.run_id, **row, **_circumstances(row["iteration"], stages)} for row in iterations
        ]
        prompts = {row["row"]: prompt_of(row["task"]) for row in _rows(store, segment.run_id, _PROMPTS, *span)}
        for uri in sorted({stage["dataset"] for stage in stages if stage["dataset"] is not None}):
            if uri.startswith(f"{Location(store).uri}/datasets/"):  # the prompts of another store are not available
                tasks = run_query(store, _DATASET_PROMPTS, values=uri.rsplit("/", 2)[-2:]).to_pylist()
                prompts |= {row["row"]: prompt_of(row["task"]) for row in tasks}
        for row in _rows(store, segment.run_id, _ROWS, *span):
            known = by_row.get(row["row"])
            if known is None:
                by_row[row["row"]] = row | {"prompt": prompts.get(row["row"])}
            else:  # trained on in an earlier segment too
                total = known["rollouts"] + row["rollouts"]
                known["reward"] = (known["reward"] * known["rollouts"] + row["reward"] * row["rollouts"]) / total
                known["rollouts"] = total
                known["trained_tokens"] += row["trained_tokens"]
                known["iterations"] = sorted({*known["iterations"], *row["iterations"]})
    result.rows = [by_row[name] for name in sorted(by_row)]
    if not result.iterations and version > 0 and not any(segment.note for segment in segments):
        raise StoreError(_not_trained(store, run_id, version))
    missing = version > 0 and result.iterations and result.iterations[-1]["iteration"] != version
    if missing:
        raise StoreError(_not_trained(store, run_id, version))
    return result


def segments_of(store: str, run_id: str, version: int) -> list[Segment]:
    """Return the iterations of a version, newest first: of the run, and of its ancestors."""
    segments: list[Segment] = []
    seen: set[str] = set()
    current, last = run_id, version
    while True:
        seen.add(current)
        parent = identity_of(store, current).get("parent")
        start = 0 if parent is None else int(parent["version"])
        segments.append(Segment(current, start + 1, last))
        if parent is None:
            return segments
        origin, last = parent["run_id"], min(start, last)
        if last == 0:
            return segments
        root = Location(store).uri + "/"
        if (
            origin in seen
            or not parent["checkpoint"]["uri"].startswith(root)
            or not (run_exists(store, origin) and identity_of(store, origin)["uid"] == parent["uid"])
        ):
            segments.append(Segment(origin, 1, 0, f"run {origin} up to version {last} is not in this store any more"))
            return segments
        current = origin


def row_history(store: str, row: str, runs: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the collections of a task row, and the first version trained on it; later forks have it too.

    Raises:
        QueryError: no iteration collected it.
    """
    entries = [entry | {"dataset": None} for entry in run_query(store, _OF_ROW, runs=runs, values=[row]).to_pylist()]
    configs = run_query(store, "SELECT run_id, config FROM runs", runs=runs).to_pylist()
    if offline := [run["run_id"] for run in configs if json.loads(run["config"]).get("offline")]:
        learnt = run_query(store, _OF_ROW_OFFLINE, runs=offline, values=[row, f"{row}#"]).to_pylist()
        entries += [entry | {"dataset": dataset_label(entry["dataset"])} for entry in learnt]
    if not entries:
        raise QueryError(
            f"No iteration collected the row {row!r}. Ids of rows: "
            'roundhouse query "SELECT DISTINCT group_id FROM rollouts LIMIT 10".'
        )
    newest = _newest_versions(store, sorted({entry["run_id"] for entry in entries}))
    forked = run_query(store, "SELECT run_id, parent FROM runs WHERE parent IS NOT NULL").to_pylist()
    parents = [(json.loads(run["parent"]), run["run_id"]) for run in forked]
    forks = sorted((parent["run_id"], int(parent["version"]), fork) for parent, fork in parents)
    for entry in entries:
        entry["refused"] = entry["refused"] or []
        went_in = entry["trained"] > 0
        entry["first_version"] = entry["iteration"] if went_in else None
        entry["newest_version"] = newest.get(entry["run_id"]) if went_in else None
        entry["forks"] = [
            fork for origin, at, fork in forks if went_in and origin == entry["run_id"] and at >= entry["iteration"]
        ]
    return entries


def dataset_label(uri: str | None) -> str | None:
    """`nightly@20261121T020000Z-v000012` of a dataset's version, by its URI."""
    return None if uri is None else "@".join(uri.rsplit("/", 2)[-2:])


def identity_of(store: str, run_id: str) -> dict[str, Any]:
    """Return the run's run.json.

    Raises:
        StoreError: the run does not exist, or its run.json is damaged.
    """
    try:
        return read_identity(Location(store) / f"runs/{run_id}")
    except NotFound:
        raise no_such_run(store, run_id) from None


def prompt_of(task: str | None) -> str | None:
    """Return the last user message of a task row (JSON); None if the row has another form."""
    try:
        items = json.loads(task or "null")["responses_create_params"]["input"]
        if isinstance(items, str):
            return items
        texts = [item["content"] for item in items if item.get("role") == "user"]
        return texts[-1] if isinstance(texts[-1], str) else "".join(part.get("text", "") for part in texts[-1])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _circumstances(iteration: int, stages: list[dict[str, Any]]) -> dict[str, Any]:
    own = [stage for stage in stages if stage["iteration"] == iteration]
    return {
        "seed": own[0]["seed"] if own else None,
        "base_version": next((stage["policy_version"] for stage in own if stage["stage"] == StageKind.TRAIN), None),
        "dataset": next((dataset_label(stage["dataset"]) for stage in own if stage["dataset"] is not None), None),
        "code_versions": sorted({stage["code_version"] for stage in own}),
        "config_digests": sorted({stage["config_digest"] for stage in own}),
        "attempts": {stage["stage"]: stage["attempt"] for stage in own},
    }


def _rows(store: str, run_id: str, sql: str, *values: Any) -> list[dict[str, Any]]:
    return run_query(store, sql, runs=[run_id], values=values).to_pylist()


def _newest_versions(store: str, runs: list[str]) -> dict[str, int]:
    rows = run_query(
        store, "SELECT run_id, max(iteration) AS newest FROM stages WHERE stage = 'train' GROUP BY 1", runs=runs
    )
    return {row["run_id"]: row["newest"] for row in rows.to_pylist()}


def _not_trained(store: str, run_id: str, version: int) -> str:
    newest = _newest_versions(store, [run_id]).get(run_id, 0)
    return f"Run {run_id!r} has not trained a version {version}; its newest is {newest}."


SHOWN = (
    "reward/mean",
    "evaluation/reward/mean",
    "rollout/generated_tokens_mean",
    "rollout/truncated_rate",
    "validate/quarantined",
    "train/approx_entropy",
    "train/clip_fraction",
    "train/grad_norm",
    "train/token_mult_prob_error",
    "time/iteration",
)
"""Metrics that are compared unless others are asked for."""

NOT_TOLD = ("run_id", "store")
"""Keys that differ between any two runs and explain nothing."""


@dataclass(slots=True)
class RunComparison:
    """Two runs."""

    a: str
    b: str
    code_versions: tuple[str, str]
    differences: dict[str, tuple[Any, Any]]
    """Dotted keys of the configuration with different values."""
    curves: dict[str, dict[int, tuple[float | None, float | None]]]
    """By metric and iteration, the value of each run; None if it is missing."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(store: str, a: str, b: str, metrics: list[str] | None = None) -> RunComparison:
    """Compare two runs of a store.

    Args:
        metrics: names of metrics; the usual ones when left out.

    Raises:
        StoreError: a run is not there.
        QueryError: neither has a metric of that name.
    """
    identities = [identity_of(store, run_id) for run_id in (a, b)]
    flat = [flatten(identity["config"]) for identity in identities]
    keys = sorted((flat[0].keys() | flat[1].keys()) - set(NOT_TOLD))
    run_curves = curves(store, a, b)
    if unknown := [name for name in metrics or () if name not in run_curves]:
        near = ", ".join(sorted(run_curves)) or "none"
        raise QueryError(f"Neither {a} nor {b} has a metric {unknown[0]!r}. Available: {near}.")
    return RunComparison(
        a,
        b,
        (identities[0]["code_version"], identities[1]["code_version"]),
        {key: (flat[0].get(key), flat[1].get(key)) for key in keys if flat[0].get(key) != flat[1].get(key)},
        {name: run_curves[name] for name in (metrics or SHOWN) if name in run_curves},
    )


def curves(store: str, a: str, b: str) -> dict[str, dict[int, tuple[float | None, float | None]]]:
    """Every metric of both runs, by iteration."""
    rows = run_query(store, "SELECT run_id, iteration, metrics FROM iterations ORDER BY iteration", runs=sorted({a, b}))
    result: dict[str, dict[int, tuple[float | None, float | None]]] = {}
    for row in rows.to_pylist(maps_as_pydicts="lossy"):
        for name, value in row["metrics"].items():
            by_iteration = result.setdefault(name, {})
            of_a, of_b = by_iteration.get(row["iteration"], (None, None))
            by_iteration[row["iteration"]] = (
                value if row["run_id"] == a else of_a,
                value if row["run_id"] == b else of_b,
            )
    return result
