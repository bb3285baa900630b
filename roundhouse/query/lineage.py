"""What a checkpoint was trained on, and what became of a row; and how two runs differ.

Invariant: every answer comes from manifests and from the datasets that they name, so it holds for a run that was resumed, was
forked, or whose older checkpoints were deleted. Version k of a run is trained on iterations 1 to k; of a fork, on those of its
parent up to the fork, and on its own after it.

    base    1 2 3 4 5                    why wide 7  =  base 1-4, wide 5-7
    wide    · · · └── 5 6 7
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from roundhouse.config.loading import flatten
from roundhouse.errors import StoreError
from roundhouse.query.database import QueryError, run_query
from roundhouse.store.lineage import read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import no_such_run, run_exists
from roundhouse.store.stage import StageKind

_USED = """
WITH used AS (
  SELECT s.iteration, s.rollout_id, regexp_replace(s.group_id, '#[0-9]+$', '') AS row, s.policy_version, s.reward,
         c.trained, c.trained_tokens
  FROM sequences s JOIN columns c USING (iteration, sequence_id)
  WHERE s.iteration BETWEEN ? AND ?
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
_PROMPTS = """
SELECT regexp_replace(group_id, '#[0-9]+$', '') AS row, any_value(task) AS task
FROM rollouts WHERE stage = 'collect' AND iteration BETWEEN ? AND ? AND sample = 0 GROUP BY 1
"""
_DATASET_PROMPTS = """
SELECT regexp_replace(group_id, '#[0-9]+$', '') AS row, any_value(task) AS task
FROM dataset_rollouts WHERE dataset = ? AND version = ? AND sample = 0 GROUP BY 1
"""
_STAGES = """
SELECT iteration, stage, seed, code_version, config_digest, policy_version, attempt, inputs['dataset'] AS dataset FROM stages
WHERE iteration BETWEEN ? AND ? AND stage IN ('collect', 'validate', 'train') ORDER BY iteration, stage
"""
_OF_ROW = """
SELECT r.run_id, r.iteration, count(DISTINCT r.rollout_id) AS rollouts,
       count(DISTINCT r.rollout_id) FILTER (c.trained) AS trained, sum(c.trained_tokens)::BIGINT AS trained_tokens,
       avg(r.reward) AS reward, list_sort(list(DISTINCT q.reason) FILTER (q.reason IS NOT NULL)) AS refused
FROM (SELECT * FROM rollouts WHERE stage = 'collect' AND (group_id = ? OR starts_with(group_id, ?))) r
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
    """What went into a checkpoint."""

    run_id: str
    version: int
    checkpoint: str | None
    """URI; None when retention has deleted it."""
    segments: list[Segment]
    iterations: list[dict[str, Any]] = field(default_factory=list)
    """One entry an iteration: what was trained on, with which seed, code and configuration, sampled by which versions, and from
    which dataset where it was not collected by the run itself."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One entry a task row, with its prompt."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def trained_on(store: str, run_id: str, version: int) -> TrainedOn:
    """Rows, prompts, policy versions, seeds and code behind a checkpoint.

    Raises:
        StoreError: there is no such run, or it has not trained this version.
    """
    segments = segments_of(store, run_id, version)
    place = Location(store) / f"runs/{run_id}/checkpoints/{version:06d}"
    found = TrainedOn(run_id, version, place.uri if place.exists("manifest.json") else None, segments)
    by_row: dict[str, dict[str, Any]] = {}
    for segment in reversed(segments):
        if segment.first > segment.last:
            continue
        span = (segment.first, segment.last)
        iterations = _rows(store, segment.run_id, _ITERATIONS, *span)
        stages = _rows(store, segment.run_id, _STAGES, *span)
        found.iterations += [
            {"run_id": segment.run_id, **row, **_circumstances(row["iteration"], stages)} for row in iterations
        ]
        prompts = {row["row"]: prompt_of(row["task"]) for row in _rows(store, segment.run_id, _PROMPTS, *span)}
        for uri in sorted({stage["dataset"] for stage in stages if stage["dataset"] is not None}):
            if uri.startswith(f"{Location(store).uri}/datasets/"):  # of one in another store there are no prompts
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
    found.rows = [by_row[name] for name in sorted(by_row)]
    if not found.iterations and version > 0 and not any(segment.note for segment in segments):
        raise StoreError(_not_trained(store, run_id, version))
    missing = version > 0 and found.iterations and found.iterations[-1]["iteration"] != version
    if missing:
        raise StoreError(_not_trained(store, run_id, version))
    return found


def segments_of(store: str, run_id: str, version: int) -> list[Segment]:
    """The iterations behind a version, the newest first: of the run, and of those that it was forked from."""
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
        there = Location(store).uri + "/"
        if (
            origin in seen
            or not parent["checkpoint"]["uri"].startswith(there)
            or not (run_exists(store, origin) and identity_of(store, origin)["uid"] == parent["uid"])
        ):
            segments.append(Segment(origin, 1, 0, f"run {origin} up to version {last} is not in this store any more"))
            return segments
        current = origin


def row_history(store: str, row: str, runs: list[str] | None = None) -> list[dict[str, Any]]:
    """Where a task row was collected, and the first version that it went into; runs that were forked later have it too.

    Raises:
        QueryError: no iteration collected it.
    """
    values = [row, f"{row}#"]
    found = [entry | {"dataset": None} for entry in run_query(store, _OF_ROW, runs=runs, values=values).to_pylist()]
    configs = run_query(store, "SELECT run_id, config FROM runs", runs=runs).to_pylist()
    if offline := [run["run_id"] for run in configs if json.loads(run["config"]).get("offline")]:
        learnt = run_query(store, _OF_ROW_OFFLINE, runs=offline, values=values).to_pylist()
        found += [entry | {"dataset": dataset_label(entry["dataset"])} for entry in learnt]
    if not found:
        raise QueryError(
            f"No iteration collected the row {row!r}. Ids of rows: "
            'roundhouse query "SELECT DISTINCT group_id FROM rollouts LIMIT 10".'
        )
    newest = _newest_versions(store, sorted({entry["run_id"] for entry in found}))
    forked = run_query(store, "SELECT run_id, parent FROM runs WHERE parent IS NOT NULL").to_pylist()
    parents = [(json.loads(run["parent"]), run["run_id"]) for run in forked]
    forks = sorted((parent["run_id"], int(parent["version"]), fork) for parent, fork in parents)
    for entry in found:
        entry["refused"] = entry["refused"] or []
        went_in = entry["trained"] > 0
        entry["first_version"] = entry["iteration"] if went_in else None
        entry["newest_version"] = newest.get(entry["run_id"]) if went_in else None
        entry["forks"] = [
            fork for origin, at, fork in forks if went_in and origin == entry["run_id"] and at >= entry["iteration"]
        ]
    return found


def dataset_label(uri: str | None) -> str | None:
    """`nightly@20261121T020000Z-v000012` of a dataset's version, by its URI."""
    return None if uri is None else "@".join(uri.rsplit("/", 2)[-2:])


def identity_of(store: str, run_id: str) -> dict[str, Any]:
    """The run's run.json.

    Raises:
        StoreError: there is no such run, or its run.json is damaged.
    """
    try:
        return read_identity(Location(store) / f"runs/{run_id}")
    except NotFound:
        raise no_such_run(store, run_id) from None


def prompt_of(task: str | None) -> str | None:
    """The last thing that the user says in a task row (JSON); None where the row has another shape."""
    try:
        asked = json.loads(task or "null")["responses_create_params"]["input"]
        if isinstance(asked, str):
            return asked
        said = [item["content"] for item in asked if item.get("role") == "user"]
        return said[-1] if isinstance(said[-1], str) else "".join(part.get("text", "") for part in said[-1])
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
    found = run_query(
        store, "SELECT run_id, max(iteration) AS newest FROM stages WHERE stage = 'train' GROUP BY 1", runs=runs
    )
    return {row["run_id"]: row["newest"] for row in found.to_pylist()}


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
    """Dotted keys of the configuration whose values differ."""
    curves: dict[str, dict[int, tuple[float | None, float | None]]]
    """By metric and iteration, the value of each run; None where it has none."""

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
    found = curves(store, a, b)
    if unknown := [name for name in metrics or () if name not in found]:
        near = ", ".join(sorted(found)) or "none"
        raise QueryError(f"Neither {a} nor {b} has a metric {unknown[0]!r}. There are: {near}.")
    return RunComparison(
        a,
        b,
        (identities[0]["code_version"], identities[1]["code_version"]),
        {key: (flat[0].get(key), flat[1].get(key)) for key in keys if flat[0].get(key) != flat[1].get(key)},
        {name: found[name] for name in (metrics or SHOWN) if name in found},
    )


def curves(store: str, a: str, b: str) -> dict[str, dict[int, tuple[float | None, float | None]]]:
    """Every metric of both runs, by iteration."""
    rows = run_query(store, "SELECT run_id, iteration, metrics FROM iterations ORDER BY iteration", runs=sorted({a, b}))
    found: dict[str, dict[int, tuple[float | None, float | None]]] = {}
    for row in rows.to_pylist(maps_as_pydicts="lossy"):
        for name, value in row["metrics"].items():
            by_iteration = found.setdefault(name, {})
            of_a, of_b = by_iteration.get(row["iteration"], (None, None))
            by_iteration[row["iteration"]] = (
                value if row["run_id"] == a else of_a,
                value if row["run_id"] == b else of_b,
            )
    return found
