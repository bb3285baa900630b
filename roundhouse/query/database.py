"""One SQL statement over the runs of a store, by a DuckDB that reads them and can do nothing else.

Invariant: a statement cannot write, reach a file, a network or an extension. Three locks, each enough for most of it: only one
SELECT (or EXPLAIN) is taken; the database has no external access and its configuration is locked, before it sees the
statement; and what it does read comes as Arrow datasets, whose files only we chose.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import duckdb

from roundhouse.errors import RoundhouseError
from roundhouse.query.parts import datasets_stages, runs_stages
from roundhouse.query.tables import TABLES, build_dataset_table, build_table
from roundhouse.store.location import Location
from roundhouse.store.run import no_such_run

if TYPE_CHECKING:
    import pyarrow as pa

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
    """The answer to a statement as an Arrow table.

    The statement runs in a thread of its own: DuckDB looks for an interrupt only between vectors of rows, and one call of a
    function may take minutes. A statement that does not heed it is left behind.

    Args:
        timeout_seconds: until this call returns, whatever the statement does.
        memory_gib: what DuckDB may hold, such as groups, sorted rows and the two sides of a join.
        values: of the statement's `?`, in order.
        runs: only these; all when left out.
        unfinished: rows of stages that are not complete too, with `complete` false.

    Raises:
        QueryError: not a single reading statement, an unknown table or column, or it needs too much memory.
        QueryTimeout
        StoreError: the store has no such run, or cannot be read.
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
    there = (Location(store) / "runs").names()
    if missing := sorted(set(runs or ()) - set(there)):
        raise no_such_run(store, missing[0])
    chosen = there if runs is None else runs
    kinds = {name: TABLES[name].stages for name in names}
    stages = []
    if any(wanted != () for wanted in kinds.values()):
        everything = any(wanted is None for wanted in kinds.values())
        wanted = {stage for own in kinds.values() for stage in own or ()}
        stages = runs_stages(
            store,
            runs=runs,
            wanted=lambda stage: everything or stage.stage in wanted,
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
    from roundhouse.query.parts import DATASET_PLACE, PLACE, with_place

    lines = []
    for name in sorted(names):
        kind = TABLES[name]
        place = PLACE if kind.of_datasets is None else DATASET_PLACE
        schema = with_place(kind.schema, place) if kind.partitioned else kind.schema
        lines.append(f"  {name}: {', '.join(schema.names)}")
    return "\n".join(lines)


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
