"""Run one SQL statement over the runs of a store, in a DuckDB that can only read them.

Invariant: a statement cannot write, or reach a file, a network or an extension. Three locks protect against this: only
one SELECT (or EXPLAIN) is accepted; external access is off and the configuration locked before the statement is read;
and data arrives as Arrow datasets, and only we choose their files.

Tables: the rows of `rollouts`, `turns`, `sequences`, `quarantine` and `columns` are in Parquet and read lazily; the
others are made from run.json and manifests, which are small.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from roundhouse.errors import RoundhouseError, StoreError
from roundhouse.sql.parts import (
    DATASET_PLACE,
    PLACE,
    StageFiles,
    columns_found,
    dataset_of,
    datasets_stages,
    runs_stages,
    with_place,
)
from roundhouse.store.lineage import read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import no_such_run, run_exists, run_ids
from roundhouse.store.stage import Manifest, StageKind
from roundhouse.trajectories.schemas import QUARANTINE, ROLLOUTS, SEQUENCES, TURNS

log = logging.getLogger(__name__)

_READS = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_LOCKS = (
    "SET python_enable_replacements = false",  # else a table's name could be a variable of this process
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET allow_community_extensions = false",
    "SET TimeZone = 'UTC'",
    "SET lock_configuration = true",
)


class QueryError(RoundhouseError):
    """A statement that is not allowed, or cannot be answered."""


class QueryTimeout(QueryError):
    """A statement took longer than it may; it may still be at work in its thread."""


def run_query(
    store: str,
    sql: str,
    *,
    runs: list[str] | None = None,
    unfinished: bool = False,
    timeout_seconds: float = 300.0,
    memory_gib: float = 4.0,
    values: Sequence[Any] = (),
) -> pa.Table:
    """Return the result of a statement as an Arrow table.

    The statement runs in a separate thread: DuckDB checks for an interrupt only between vectors of rows, and one call
    of a function may take minutes. A statement that ignores it is abandoned.

    Args:
        timeout_seconds: time limit of this call.
        memory_gib: memory limit of DuckDB for groups, sorted rows and joins.
        values: of the statement's `?`, in order.
        runs: only these; by default all.
        unfinished: also rows of incomplete stages, with `complete` false.

    Raises:
        QueryError: not a single reading statement, an unknown table or column, or it needs too much memory.
        QueryTimeout
        StoreError: a run does not exist, or the store cannot be read.
    """
    database = sealed_database(memory_gib)
    answer: Future[pa.Table] = Future()

    def run() -> None:
        try:
            statement = _checked(database, sql)
            names = _tables_of(database, statement)
            for name, table in load_tables(store, names, runs=runs, unfinished=unfinished).items():
                database.register(name, table)
            answer.set_result(_executed(database, statement, names, values))
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            answer.set_exception(error)

    threading.Thread(target=run, name="query", daemon=True).start()
    try:
        wait([answer], timeout_seconds)
        if not answer.done():
            raise QueryTimeout(
                f"The query was ended after {timeout_seconds:g} s. Name runs or iterations in WHERE, or raise --timeout."
            )
        return answer.result()
    finally:
        if answer.done():
            database.close()
        else:  # closing would wait for the statement
            database.interrupt()


def sealed_database(memory_gib: float) -> duckdb.DuckDBPyConnection:
    """An empty database in memory, without access to anything outside."""
    memory = f"{memory_gib * 1024:.0f}MiB"
    database = duckdb.connect(
        ":memory:", config={"enable_external_access": "false", "temp_directory": "", "memory_limit": memory}
    )
    for lock in _LOCKS:
        database.execute(lock)
    return database


def load_tables(
    store: str, names: set[str], *, runs: list[str] | None = None, unfinished: bool = False
) -> dict[str, object]:
    """The named tables, opened; nothing of their rows is read yet."""
    if not names:
        return {}
    if missing := sorted(run_id for run_id in set(runs or ()) if not run_exists(store, run_id)):
        raise no_such_run(store, missing[0])
    chosen = run_ids(store) if runs is None else runs
    kinds = {name: TABLES[name].stages for name in names}
    stages = []
    if any(columns != () for columns in kinds.values()):
        everything = any(columns is None for columns in kinds.values())
        columns = {stage for own in kinds.values() for stage in own or ()}
        stages = runs_stages(
            store,
            runs=runs,
            wanted=lambda stage: everything or stage.stage in columns,
            unfinished=unfinished,
        )
    about_datasets = {name for name in names if TABLES[name].of_datasets is not None}
    versions = datasets_stages(store, runs=runs, unfinished=unfinished) if about_datasets else []
    return {
        name: build_dataset_table(name, versions)
        if name in about_datasets
        else build_table(name, store, chosen, stages)
        for name in names
    }


def _executed(database: duckdb.DuckDBPyConnection, sql: str, names: set[str], values: Sequence[Any]) -> pa.Table:
    try:
        return database.sql(sql, params=list(values)).to_arrow_table()
    except duckdb.OutOfMemoryException as error:
        raise QueryError(f"{_first_line(error)} Name runs or iterations in WHERE, or raise --memory.") from error
    except duckdb.CatalogException as error:
        raise QueryError(f"{_first_line(error)} Tables: {', '.join(TABLES)}.") from error
    except duckdb.BinderException as error:
        raise QueryError(f"{_first_line(error)}\n{describe(names)}".rstrip()) from error
    except duckdb.Error as error:
        raise QueryError(_first_line(error)) from error


def describe(names: set[str]) -> str:
    """The columns of tables, a line each."""
    return "\n".join(f"  {name}: {', '.join(schema_of(name).names)}" for name in sorted(names))


def schema_of(name: str) -> pa.Schema:
    """The columns that a query sees of a table of `TABLES`."""
    kind = TABLES[name]
    place = PLACE if kind.of_datasets is None else DATASET_PLACE
    return with_place(kind.schema, place) if kind.partitioned else kind.schema


def _checked(database: duckdb.DuckDBPyConnection, sql: str) -> str:
    try:
        statements = database.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(f"{_first_line(error)} (in: {sql.strip()!r})") from error
    if len(statements) != 1:
        raise QueryError(f"One statement at a time; this has {len(statements)}.")
    kind = statements[0].type
    if kind not in _READS:
        raise QueryError(f"A query only reads: {kind.name} is not allowed. Begin with SELECT, FROM or WITH.")
    return statements[0].query


def _tables_of(database: duckdb.DuckDBPyConnection, sql: str) -> set[str]:
    """The known tables that a statement names. Of an unknown one, DuckDB itself complains when it runs."""
    try:
        named = {name.lower() for name in database.get_table_names(sql)}
    except duckdb.Error:
        named = set()
    # EXPLAIN and DESCRIBE name no tables to `get_table_names`.
    return {name for name in TABLES if name in named} or {name for name in TABLES if name in sql.lower() and not named}


def _first_line(error: Exception) -> str:
    text = str(error).split("\n\nLINE")[0].split("\nLINE")[0]
    return text.strip().replace("\n", " ")


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
        ("trainer_logprobs", pa.list_(pa.float32())),  # before the first update; null if not computed
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
    """Stages of its datasets; None: the table is made from manifests of all stages, or from run.json."""
    partitioned: bool = False
    """Whether its rows are in Parquet."""
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
    return pa.Table.from_pylist(_manifest_rows(versions), schema=kind.schema)


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
        try:
            identity = read_identity(Location(store) / f"runs/{run_id}")
        except (StoreError, NotFound) as error:
            log.warning("run %s is left out: %s", run_id, error)
            continue
        config = identity["config"]
        environment = config.get("environment")
        rows.append(
            {
                **{
                    name: identity.get(name)
                    for name in ("run_id", "uid", "created_at", "config_digest", "code_version")
                },
                "environment": None if not isinstance(environment, dict) else environment.get("kind"),
                "seed": config.get("seed"),
                "parent": None if identity.get("parent") is None else json.dumps(identity["parent"]),
                "config": json.dumps(config),
            }
        )
    return rows


def _manifest_rows(stages: Sequence[StageFiles]) -> list[dict[str, Any]]:
    """Return the manifests' data; each table takes the columns of its schema."""
    return [
        {
            "run_id": manifest.run_id,
            "iteration": manifest.iteration,
            "draw": manifest.iteration,
            "stage": manifest.kind,
            "dataset": stage.dataset,
            "version": stage.version or stage.iteration,
            "uri": stage.uri,
            "policy_version": manifest.provenance.policy_version,
            "attempt": manifest.attempt,
            "started_at": manifest.started_at,
            "finished_at": manifest.finished_at,
            "seconds": manifest.finished_at - manifest.started_at,
            "cpu_seconds": manifest.resources.get("cpu_seconds"),
            "rollouts": manifest.counts.get("requested"),
            "bytes": sum(entry.size for entry in manifest.files),
            "files": len(manifest.files),
            "seed": manifest.provenance.seed,
            "config_digest": manifest.provenance.config_digest,
            "code_version": manifest.provenance.code_version,
            "counts": [(name, float(count)) for name, count in manifest.counts.items()],
            "metrics": list(manifest.metrics.items()),
            "inputs": [(name, reference.uri) for name, reference in manifest.inputs.items()],
        }
        for stage in stages
        if (manifest := stage.manifest) is not None
    ]


def _iteration_rows(stages: Sequence[StageFiles]) -> list[dict[str, Any]]:
    from roundhouse.stages.evaluate import set_of
    from roundhouse.stages.report import STAGES as ORDER
    from roundhouse.stages.report import iteration_metrics

    by_iteration: dict[tuple[str, int], dict[str, Manifest]] = {}
    for stage in stages:
        if stage.manifest is not None:
            by_iteration.setdefault((stage.run_id, stage.iteration), {})[stage.stage] = stage.manifest
    rows = []
    for (run_id, iteration), manifests in by_iteration.items():
        ordered = {kind: manifests[kind] for kind in (*ORDER, *filter(set_of, manifests)) if kind in manifests}
        rows.append(
            {
                "run_id": run_id,
                "iteration": iteration,
                "stages": list(ordered),
                "metrics": list(iteration_metrics(ordered).items()),
            }
        )
    return rows


_FROM_MANIFESTS: dict[str, Callable[[Sequence[StageFiles]], list[dict[str, Any]]]] = {
    "stages": _manifest_rows,
    "iterations": _iteration_rows,
    "checkpoints": lambda stages: _manifest_rows([each for each in stages if each.stage == StageKind.CHECKPOINT]),
}
