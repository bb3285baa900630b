"""`roundhouse store | query`: check a store, ask it by SQL."""

from __future__ import annotations

import atexit
import csv
import json
import math
import os
from dataclasses import asdict
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out, out_json, print_table

if TYPE_CHECKING:
    import pyarrow as pa

app = typer.Typer(no_args_is_help=True, help="Check a store, and clear it of what nothing needs.")


@app.command()
def verify(
    store: StoreOption = DEFAULT_STORE,
    run_id: Annotated[str | None, typer.Option("--run", help="Only this run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every file, reference and ledger of every manifest. Exits with 1 when something is damaged."""
    from roundhouse.store.verification import verify as check
    from roundhouse.trajectories.records import ledger_faults

    result = check(store, run_id, also=ledger_faults)
    if as_json:
        out_json(asdict(result))
    else:
        from rich.markup import escape

        terminal = console()
        for problem in result.problems:
            text = escape(f"{problem.uri}\n        {problem.what}\n      → {problem.remedy}")
            terminal.print(f"[red]damaged[/] {text}", highlight=False)
        for uri in result.unfinished:
            terminal.print(f"[yellow]unfinished[/] {escape(uri)}", highlight=False)
        terminal.print(
            f"{result.manifests} manifests, {result.files} files, {result.size / 2**20:.1f} MiB checked: "
            f"{len(result.problems)} damaged, {len(result.unfinished)} unfinished",
            highlight=False,
        )
    if result.problems:
        raise typer.Exit(1)


@app.command()
def gc(
    store: StoreOption = DEFAULT_STORE,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it. Without this, it is only listed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the files that no run needs."""
    from roundhouse.store import verification

    garbage = verification.find_garbage(store)
    if delete:
        verification.collect_garbage(store, garbage)
    if as_json:
        return out_json([asdict(item) for item in garbage])
    for item in garbage:
        out(f"{item.name}: {item.reason}")
    state = "deleted" if delete else "found; delete them with --delete"
    return console().print(f"{len(garbage)} files {state}", highlight=False)


commands = typer.Typer()


@commands.command()
def query(
    sql: Annotated[
        str | None,
        typer.Argument(help="One SELECT, such as: SELECT iteration, count(*) FROM rollouts GROUP BY 1"),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    runs: Annotated[list[str] | None, typer.Option("--run", help="Only this run; may be repeated.")] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Rows of stages that are not complete, too (complete = false).")
    ] = False,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV; lists and maps as JSON.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="List the tables and their columns.")] = False,
    limit: Annotated[int, typer.Option(help="Rows shown on a terminal; JSON and CSV have all.", min=1)] = 100,
    timeout: Annotated[float, typer.Option(help="Seconds that the query may take.", min=0.1, max=1e6)] = 300.0,
    memory: Annotated[
        float, typer.Option(help="GiB that the query may hold, such as groups and sorted rows.", min=0.1, max=1e6)
    ] = 4.0,
) -> None:
    """Ask the runs of a store in SQL (DuckDB): rollouts, turns, sequences, quarantine, columns, iterations, stages,
    checkpoints, runs. Read-only."""
    if tables:
        from roundhouse.sql.database import TABLES, schema_of

        schemas = {name: schema_of(name) for name in TABLES}
        if as_json:
            return out_json(
                {name: {field.name: str(field.type) for field in schema} for name, schema in schemas.items()}
            )
        terminal = console()
        for name, schema in schemas.items():
            terminal.print(f"[bold]{name}[/]  [dim]{TABLES[name].about}[/]", highlight=False)
            terminal.print(f"  {', '.join(schema.names)}", highlight=False)
        return None
    if sql is None:
        raise typer.BadParameter(
            'Give a statement, as in roundhouse query "SELECT count(*) FROM rollouts"; or --tables.'
        )
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other.")
    from roundhouse.cli.options import exit_code
    from roundhouse.sql.database import QueryTimeout, run_query

    try:
        answer = run_query(store, sql, runs=runs, unfinished=unfinished, timeout_seconds=timeout, memory_gib=memory)
    except QueryTimeout as error:
        # At its end, the interpreter would wait for a statement that does not heed its interrupt.
        atexit.register(os._exit, exit_code(error))
        raise
    if as_json:
        out_json(_plain_rows(answer))
    elif as_csv:
        writer = csv.writer(_Stdout(), lineterminator="\n")
        writer.writerow(answer.schema.names)
        for row in _plain_rows(answer):
            writer.writerow("" if value is None else _cell(value, digits=None) for value in row.values())
    else:
        _show(answer, limit)
    return None


class _Stdout:
    """Lines of CSV go to stdout as every other output does."""

    def write(self, line: str) -> None:
        out(line)


def _show(answer: pa.Table, limit: int) -> None:
    from pyarrow import types

    numbers = [
        field.name
        for field in answer.schema
        if types.is_integer(field.type) or types.is_floating(field.type) or types.is_decimal(field.type)
    ]
    rows = ([_cell(value) for value in row.values()] for row in _plain_rows(answer.slice(0, limit)))
    print_table(answer.schema.names, rows, right=numbers)
    if answer.num_rows > limit:
        console().print(
            f"[dim]{limit} of {answer.num_rows} rows; all of them: --limit, --csv or --json[/]", highlight=False
        )


def _plain_rows(answer: pa.Table) -> list[dict[str, Any]]:
    """The rows as JSON has them. A map is a list of pairs to Arrow, and a mapping to everybody else."""
    return [{name: _plain(value) for name, value in row.items()} for row in answer.to_pylist(maps_as_pydicts="lossy")]


def _plain(value: Any) -> Any:
    """NaN and infinity are null; a whole decimal (DuckDB's sum of integers) is an integer; what JSON does not know is text."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def _cell(value: Any, digits: int | None = 6) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return repr(value) if digits is None else f"{value:.{digits}g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
