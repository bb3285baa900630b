"""`roundhouse runs lineage | compare`: what a checkpoint was trained on, what became of a row, and how two runs differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out

if TYPE_CHECKING:
    from rich.console import Console

    from roundhouse.query.comparison import Comparison
    from roundhouse.query.lineage import TrainedOn

app = typer.Typer()

ITERATIONS_SHOWN, SPARK_WIDTH = 16, 32
_BLOCKS = "▁▂▃▄▅▆▇█"


@app.command("lineage")
def lineage(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="A run.")] = None,
    version: Annotated[int | None, typer.Argument(metavar="VERSION", help="A policy version of it.", min=0)] = None,
    row: Annotated[str | None, typer.Option("--row", help="A task_id: which checkpoints it went into.")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(help="Rows shown on a terminal; JSON has all.", min=1)] = 20,
) -> None:
    """What a checkpoint was trained on: rows, prompts, policy versions, seeds, code. Or which checkpoints a row went into."""
    if row is not None:
        if version is not None:
            raise typer.BadParameter("--row asks about all versions: leave VERSION out.")
        return _show_row(store, row, run_id, as_json)
    if run_id is None or version is None:
        raise typer.BadParameter(
            "Name a run and a version (roundhouse runs lineage quickstart 12), or a row with --row."
        )
    from roundhouse.query.lineage import trained_on

    found = trained_on(store, run_id, version)
    if as_json:
        out(json.dumps(found.as_json(), indent=1))
    else:
        _show_trained_on(found, limit)
    return None


@app.command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    metrics: Annotated[list[str] | None, typer.Option("--metric", help="A metric to compare; may be repeated.")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Two runs side by side: what their configurations do not share, and their curves."""
    from roundhouse.query.comparison import compare_runs

    found = compare_runs(store, a, b, metrics)
    if as_json:
        out(json.dumps(found.as_json(), indent=1))
    else:
        _show_comparison(found)


def _show_trained_on(found: TrainedOn, limit: int) -> None:
    from rich.text import Text

    terminal = console()
    kept = found.checkpoint or "deleted by retention; what it was made from is still here"
    terminal.print(Text(f"{found.run_id}, version {found.version}", style="bold"), Text(kept, style="dim"))
    if found.version == 0:
        return terminal.print("The starting policy: no iteration stands behind it.")
    for segment in found.segments:
        if segment.note:
            terminal.print(Text(segment.note, style="yellow"))
    _show_iterations(terminal, found.iterations)
    _show_rows(terminal, found.rows, limit)
    return None


def _show_iterations(terminal: Console, iterations: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    origins = {_origin(entry) for entry in iterations}
    several = len(origins) > 1  # seldom; else it is said once, below
    left = ("run", "sampled by", "made with")
    for name in ("run", "iteration", "rows", "rollouts", "tokens", "reward", "sampled by", "made with")[: 7 + several]:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    shown = _thinned(iterations, ITERATIONS_SHOWN)
    for entry in shown:
        table.add_row(
            Text(entry["run_id"]),
            str(entry["iteration"]),
            str(entry["rows"]),
            str(entry["rollouts"]),
            f"{entry['trained_tokens']:,}",
            _number(entry["reward"]),
            f"version {', '.join(map(str, entry['policy_versions']))}"
            + (f" ({entry['dataset']})" if entry["dataset"] else ""),
            *([_origin(entry)] if several else []),
        )
    terminal.print(table)
    if len(origins) == 1:
        terminal.print(f"[dim]made with {origins.pop()}[/]", highlight=False)
    if len(shown) < len(iterations):
        terminal.print(f"[dim]{len(shown)} of {len(iterations)} iterations; all of them: --json[/]", highlight=False)


def _show_rows(terminal: Console, found: list[dict[str, Any]], limit: int) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, header_style="bold")
    for name, justify in (
        ("row", "left"),
        ("iterations", "left"),
        ("rollouts", "right"),
        ("reward", "right"),
        ("prompt", "left"),
    ):
        rows.add_column(name, justify=justify, overflow="ellipsis", no_wrap=name == "prompt")  # type: ignore[arg-type]
    for entry in found[:limit]:
        iterations = ", ".join(map(str, entry["iterations"]))
        prompt = Text(" ".join((entry["prompt"] or "–").split())[:120])
        rows.add_row(Text(entry["row"]), iterations, str(entry["rollouts"]), _number(entry["reward"]), prompt)
    terminal.print(rows)
    if len(found) > limit:
        terminal.print(f"[dim]{limit} of {len(found)} rows; more of them: --limit, --json[/]", highlight=False)


def _origin(entry: dict[str, Any]) -> str:
    """Seed, configuration and code of an iteration."""
    configs = ", ".join(digest[:8] for digest in entry["config_digests"])
    return f"seed {entry['seed']}, configuration {configs}, code {', '.join(entry['code_versions'])}"


def _show_row(store: str, row: str, run_id: str | None, as_json: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from roundhouse.query.lineage import row_history

    found = row_history(store, row, None if run_id is None else [run_id])
    if as_json:
        return out(json.dumps({"row": row, "collected": found}, indent=1))
    table = Table(box=None, header_style="bold")
    for name in ("run", "iteration", "rollouts", "trained on", "tokens", "reward", "went into"):
        table.add_column(name, justify="left" if name in ("run", "went into") else "right")
    for entry in found:
        table.add_row(
            Text(entry["run_id"] + (f" ({entry['dataset']})" if entry["dataset"] else "")),
            str(entry["iteration"]),
            str(entry["rollouts"]),
            str(entry["trained"]),
            f"{entry['trained_tokens'] or 0:,}",
            _number(entry["reward"]),
            Text(_went_into(entry)),
        )
    terminal = console()
    terminal.print(Text(row, style="bold"))
    return terminal.print(table)


def _went_into(entry: dict[str, Any]) -> str:
    if entry["first_version"] is None:
        reasons = f": {', '.join(entry['refused'])}" if entry["refused"] else ""
        return f"no version{reasons}"
    first, newest = entry["first_version"], entry["newest_version"]
    own = f"version {first}" if first == newest else f"versions {first} to {newest}"
    return f"{own}, and {', '.join(entry['forks'])}" if entry["forks"] else own


def _show_comparison(found: Comparison) -> None:
    from rich.table import Table
    from rich.text import Text

    terminal = console()
    differences = Table(box=None, header_style="bold", title="configuration", title_justify="left")
    for name in ("key", found.a, found.b):
        differences.add_column(name, overflow="fold")
    for key, values in found.differences.items():
        differences.add_row(Text(key), *(Text(json.dumps(value)) for value in values))
    if found.code_versions[0] != found.code_versions[1]:
        differences.add_row("[dim]code[/]", *found.code_versions)
    terminal.print(differences if differences.row_count else "The configurations are the same but for the run's name.")
    table = Table(box=None, header_style="bold", title="\ncurves", title_justify="left")
    for name, justify in (
        ("metric", "left"),
        (found.a, "left"),
        ("last", "right"),
        (found.b, "left"),
        ("last", "right"),
        ("b − a", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, by_iteration in found.curves.items():
        sides = [[pair[side] for pair in by_iteration.values()] for side in (0, 1)]
        given = [value for side in sides for value in side if value is not None]
        lasts = [next((value for value in reversed(side) if value is not None), None) for side in sides]
        sparks = [_spark(side, min(given), max(given)) for side in sides]
        a, b = lasts
        difference = None if a is None or b is None else b - a
        table.add_row(
            name,
            f"[yellow]{sparks[0]}[/]",
            _number(a),
            f"[cyan]{sparks[1]}[/]",
            _number(b),
            _number(difference, signed=True),
        )
    terminal.print(table)


def _spark(values: list[float | None], low: float, high: float) -> str:
    """A curve as blocks; both runs of a line share its scale."""
    marks = []
    for value in _thinned(values, SPARK_WIDTH):
        level = 0.0 if value is None or high <= low else (value - low) / (high - low)
        marks.append(" " if value is None else _BLOCKS[round(level * (len(_BLOCKS) - 1))])
    return "".join(marks)


def _thinned(values: list[Any], count: int) -> list[Any]:
    """At most so many, evenly chosen, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]


def _number(value: float | None, *, signed: bool = False) -> str:
    return "–" if value is None else f"{value:+.4g}" if signed else f"{value:.4g}"
