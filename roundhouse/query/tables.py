"""The tables that a query can name, and what is in them.

Invariant: the rows of `rollouts`, `turns`, `sequences`, `quarantine` and `columns` lie in Parquet and are read lazily; the
others are made of run.json and manifests, which are small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from roundhouse.config.renamed import translated
from roundhouse.query.parts import DATASET_PLACE, StageFiles, columns_found, dataset_of
from roundhouse.store.location import Location
from roundhouse.store.manifest import Manifest
from roundhouse.store.stage import StageKind
from roundhouse.trajectories.schemas import QUARANTINE, ROLLOUTS, SEQUENCES, TURNS

_NUMBERS = pa.map_(pa.string(), pa.float64())

COLUMNS = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),  # of algorithms that have one
        ("baseline", pa.float64()),
        ("trained", pa.bool_()),
        ("tokens", pa.int64()),
        ("trained_tokens", pa.int64()),
        ("token_mult_prob_error", pa.float64()),
        ("trainer_logprobs", pa.list_(pa.float32())),  # before the first update; null where not computed
    ]
)
"""The train stage's `columns`; an algorithm may add its own."""

RUNS = pa.schema(
    [
        ("run_id", pa.string()),
        ("uid", pa.string()),
        ("created_at", pa.float64()),
        ("environment", pa.string()),
        ("seed", pa.int64()),
        ("config_digest", pa.string()),
        ("code_version", pa.string()),
        ("parent", pa.string()),  # JSON, of a fork
        ("config", pa.string()),  # JSON
    ]
)

STAGES = pa.schema(
    [
        ("run_id", pa.string()),
        ("iteration", pa.int32()),
        ("stage", pa.string()),
        ("policy_version", pa.int32()),
        ("attempt", pa.int32()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("seconds", pa.float64()),
        ("cpu_seconds", pa.float64()),
        ("bytes", pa.int64()),
        ("seed", pa.int64()),
        ("config_digest", pa.string()),
        ("code_version", pa.string()),
        ("counts", _NUMBERS),
        ("metrics", _NUMBERS),
        ("inputs", pa.map_(pa.string(), pa.string())),  # the directories that it was made from
    ]
)

ITERATIONS = pa.schema(
    [
        ("run_id", pa.string()),
        ("iteration", pa.int32()),
        ("stages", pa.list_(pa.string())),
        ("metrics", _NUMBERS),  # of all its stages, by the names that MLflow shows
    ]
)

CHECKPOINTS = pa.schema(
    [
        ("run_id", pa.string()),
        ("version", pa.int32()),
        ("uri", pa.string()),
        ("bytes", pa.int64()),
        ("files", pa.int32()),
        ("finished_at", pa.float64()),
        ("code_version", pa.string()),
        ("config_digest", pa.string()),
        ("metrics", _NUMBERS),
    ]
)


DATASETS = pa.schema(
    [
        ("dataset", pa.string()),
        ("version", pa.string()),
        ("uri", pa.string()),
        ("run_id", pa.string()),  # that collected it
        ("policy_version", pa.int32()),
        ("draw", pa.int32()),
        ("rollouts", pa.int64()),
        ("bytes", pa.int64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("code_version", pa.string()),
        ("config_digest", pa.string()),
        ("metrics", _NUMBERS),
    ]
)


@dataclass(frozen=True, slots=True)
class TableKind:
    """A table before anything is read."""

    about: str
    schema: pa.Schema
    stages: tuple[str, ...] | None
    """Stages whose datasets it is made of; None: the table is made of manifests of all stages, or of run.json."""
    partitioned: bool = False
    """Whether its rows lie in Parquet."""
    of_datasets: str | None = None
    """For a table about `datasets/`: the part files that it is made of, or `manifests`."""


TABLES: dict[str, TableKind] = {
    "rollouts": TableKind("one row a rollout", ROLLOUTS, (StageKind.COLLECT, StageKind.EVALUATE), True),
    "turns": TableKind("one row a model call", TURNS, (StageKind.COLLECT, StageKind.EVALUATE), True),
    "sequences": TableKind("one row a training sequence", SEQUENCES, (StageKind.VALIDATE,), True),
    "quarantine": TableKind("one row a rollout kept from training", QUARANTINE, (StageKind.VALIDATE,), True),
    "columns": TableKind(
        "one row a sequence, as the algorithm and the trainer saw it", COLUMNS, (StageKind.TRAIN,), True
    ),
    "iterations": TableKind("one row an iteration, with its metrics", ITERATIONS, None),
    "stages": TableKind("one row a complete stage", STAGES, None),
    "checkpoints": TableKind("one row a checkpoint that is there", CHECKPOINTS, (StageKind.CHECKPOINT,)),
    "runs": TableKind("one row a run, with its configuration", RUNS, ()),
    "datasets": TableKind("one row a version of a collected dataset", DATASETS, (), False, "manifests"),
    "dataset_rollouts": TableKind("one row a rollout of these", ROLLOUTS, (), True, "rollouts"),
    "dataset_turns": TableKind("one row a model call of these", TURNS, (), True, "turns"),
}


def build_dataset_table(name: str, versions: Sequence[StageFiles]) -> Any:
    """The same of a table about `datasets/`."""
    kind = TABLES[name]
    if kind.partitioned:
        assert kind.of_datasets is not None
        return dataset_of(versions, kind.of_datasets, kind.schema, DATASET_PLACE)
    rows = [_dataset_row(stage, stage.manifest) for stage in versions if stage.manifest is not None]
    return pa.Table.from_pylist(rows, schema=kind.schema)


def _dataset_row(stage: StageFiles, manifest: Manifest) -> dict[str, Any]:
    return {
        "dataset": stage.dataset,
        "version": stage.version,
        "uri": stage.uri,
        "run_id": manifest.run_id,
        "policy_version": manifest.provenance.policy_version,
        "draw": manifest.iteration,
        "rollouts": manifest.counts.get("requested"),
        "bytes": sum(entry.size for entry in manifest.files),
        "started_at": manifest.started_at,
        "finished_at": manifest.finished_at,
        "code_version": manifest.provenance.code_version,
        "config_digest": manifest.provenance.config_digest,
        "metrics": list(manifest.metrics.items()),
    }


def build_table(name: str, store: str, run_ids: Sequence[str], stages: Sequence[StageFiles]) -> Any:
    """The table as something that DuckDB scans: an Arrow dataset, or a small Arrow table."""
    kind = TABLES[name]
    if kind.partitioned:
        own = [stage for stage in stages if stage.stage in (kind.stages or ())]
        schema = columns_found(own, name, kind.schema) if name == "columns" else kind.schema
        return dataset_of(own, name, schema)
    rows = runs_rows(store, run_ids) if name == "runs" else _FROM_MANIFESTS[name](stages)
    return pa.Table.from_pylist(rows, schema=kind.schema)


def runs_rows(store: str, run_ids: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for run_id in run_ids:
        identity = json.loads((Location(store) / f"runs/{run_id}").read("run.json"))
        config = translated(identity["config"])
        rows.append(
            {
                **{
                    name: identity.get(name)
                    for name in ("run_id", "uid", "created_at", "config_digest", "code_version")
                },
                "environment": config.get("environment", {}).get("kind"),
                "seed": config.get("seed"),
                "parent": None if identity.get("parent") is None else json.dumps(identity["parent"]),
                "config": json.dumps(config),
            }
        )
    return rows


def _stage_rows(stages: Sequence[StageFiles]) -> list[dict[str, Any]]:
    return [_stage_row(stage.manifest) for stage in stages if stage.manifest is not None]


def _stage_row(manifest: Manifest) -> dict[str, Any]:
    provenance = manifest.provenance
    return {
        "run_id": manifest.run_id,
        "iteration": manifest.iteration,
        "stage": manifest.kind,
        "policy_version": provenance.policy_version,
        "attempt": manifest.attempt,
        "started_at": manifest.started_at,
        "finished_at": manifest.finished_at,
        "seconds": manifest.finished_at - manifest.started_at,
        "cpu_seconds": manifest.resources.get("cpu_seconds"),
        "bytes": sum(entry.size for entry in manifest.files),
        "seed": provenance.seed,
        "config_digest": provenance.config_digest,
        "code_version": provenance.code_version,
        "counts": [(name, float(count)) for name, count in manifest.counts.items()],
        "metrics": list(manifest.metrics.items()),
        "inputs": [(name, reference.uri) for name, reference in manifest.inputs.items()],
    }


def _iteration_rows(stages: Sequence[StageFiles]) -> list[dict[str, Any]]:
    from roundhouse.stages.report import STAGES as ORDER
    from roundhouse.stages.report import iteration_metrics

    found: dict[tuple[str, int], dict[str, Manifest]] = {}
    for stage in stages:
        if stage.manifest is not None:
            found.setdefault((stage.run_id, stage.iteration), {})[stage.stage] = stage.manifest
    rows = []
    for (run_id, iteration), manifests in found.items():
        ordered = {kind: manifests[kind] for kind in ORDER if kind in manifests}
        rows.append(
            {
                "run_id": run_id,
                "iteration": iteration,
                "stages": list(ordered),
                "metrics": list(iteration_metrics(ordered).items()),
            }
        )
    return rows


def _checkpoint_rows(stages: Sequence[StageFiles]) -> list[dict[str, Any]]:
    return [
        {
            "run_id": stage.run_id,
            "version": stage.iteration,
            "uri": stage.uri,
            "bytes": sum(entry.size for entry in stage.manifest.files),
            "files": len(stage.manifest.files),
            "finished_at": stage.manifest.finished_at,
            "code_version": stage.manifest.provenance.code_version,
            "config_digest": stage.manifest.provenance.config_digest,
            "metrics": list(stage.manifest.metrics.items()),
        }
        for stage in stages
        if stage.stage == StageKind.CHECKPOINT and stage.manifest is not None
    ]


_FROM_MANIFESTS: dict[str, Callable[[Sequence[StageFiles]], list[dict[str, Any]]]] = {
    "stages": _stage_rows,
    "iterations": _iteration_rows,
    "checkpoints": _checkpoint_rows,
}
