"""`roundhouse query`: SQL over what the runs of a store have written."""

from __future__ import annotations

import atexit
import csv
import json
import math
import os
import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out

if TYPE_CHECKING:
    import pyarrow as pa

app = typer.Typer()


@app.command()
def query(
    sql: Annotated[
        str | None, typer.Argument(help='One SELECT: "SELECT environment, avg(reward) FROM rollouts GROUP BY 1"')
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
        return _show_tables(as_json)
    if sql is None:
        raise typer.BadParameter(
            'Give a statement, as in roundhouse query "SELECT count(*) FROM rollouts"; or --tables.'
        )
    if as_json and as_csv:
        raise typer.BadParameter("--json and --csv exclude each other.")
    from roundhouse.cli.exit_codes import exit_code
    from roundhouse.query.database import QueryTimeout, run_query

    try:
        answer = run_query(store, sql, runs=runs, unfinished=unfinished, timeout_seconds=timeout, memory_gib=memory)
    except QueryTimeout as error:
        # At its end, the interpreter would wait for a statement that does not heed its interrupt.
        atexit.register(os._exit, exit_code(error))
        raise
    if as_json:
        out(json.dumps(_plain_rows(answer), indent=1))
    elif as_csv:
        _write_csv(answer)
    else:
        _show(answer, limit)
    return None


def _show_tables(as_json: bool) -> None:
    from roundhouse.query.parts import DATASET_PLACE, PLACE, with_place
    from roundhouse.query.tables import TABLES

    schemas = {
        name: with_place(kind.schema, PLACE if kind.of_datasets is None else DATASET_PLACE)
        if kind.partitioned
        else kind.schema
        for name, kind in TABLES.items()
    }
    if as_json:
        out(
            json.dumps(
                {name: {field.name: str(field.type) for field in schema} for name, schema in schemas.items()}, indent=1
            )
        )
        return
    terminal = console()
    for name, schema in schemas.items():
        terminal.print(f"[bold]{name}[/]  [dim]{TABLES[name].about}[/]", highlight=False)
        terminal.print(f"  {', '.join(schema.names)}", highlight=False)


def _show(answer: pa.Table, limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for field in answer.schema:
        table.add_column(Text(field.name), justify="right" if _is_number(field.type) else "left", overflow="fold")
    for row in _plain_rows(answer.slice(0, limit)):
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    terminal = console()
    terminal.print(table)
    if answer.num_rows > limit:
        terminal.print(
            f"[dim]{limit} of {answer.num_rows} rows; all of them: --limit, --csv or --json[/]", highlight=False
        )


def _write_csv(answer: pa.Table) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(answer.schema.names)
    for row in _plain_rows(answer):
        writer.writerow("" if value is None else _cell(value, digits=None) for value in row.values())


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


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
