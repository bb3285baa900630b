"""`roundhouse simulate`: which mode, bound and number of replicas, before a GPU is paid for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, NewStoreOption, Overrides, console, out

if TYPE_CHECKING:
    from roundhouse.simulation.comparison import Row

app = typer.Typer()


@app.command()
def simulate(
    config: Annotated[
        Path | None, typer.Option("--config", help="Scenario, see configs/simulation/example.yaml.")
    ] = None,
    from_run: Annotated[str | None, typer.Option("--from-run", help="Take plan and durations from this run.")] = None,
    store: NewStoreOption = DEFAULT_STORE,
    mode: Annotated[list[str] | None, typer.Option("--mode", help="sync, batch-async, fully-async, windowed.")] = None,
    staleness: Annotated[list[int] | None, typer.Option("--staleness", help="Bound on the age, in versions.")] = None,
    replicas: Annotated[list[int] | None, typer.Option("--replicas", help="Replicas of the engine.")] = None,
    overrides: Overrides = None,
    as_json: JsonOption = False,
) -> None:
    """Compare modes, bounds and replicas in virtual time; each option may be given several times."""
    from roundhouse.config.simulation import scenario_tree
    from roundhouse.simulation.comparison import as_json as rows_as_json
    from roundhouse.simulation.comparison import compare, variants
    from roundhouse.simulation.recorded import recorded_scenario
    from roundhouse.store.run import load_run

    base = recorded_scenario(load_run(store, from_run)) if from_run is not None else None
    tree = scenario_tree(config, overrides or [], base)
    rows = compare(list(variants(tree, mode or [], staleness or [], replicas or [])))
    if as_json:
        out(json.dumps(rows_as_json(rows), indent=1))
    else:
        _print(rows)


def _print(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(box=None)
    for name in ("mode", "bound", "replicas", "iter/h", "speed", "/GPU-h", "waits", "idle", "lost"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.mode,
            str(row.staleness),
            str(row.replicas),
            f"{row.iterations_per_hour:.2f}",
            f"{row.speedup:.2f}×",
            f"{row.iterations_per_gpu_hour:.3f}",
            f"{row.trainer_wait:.0%}",
            f"{row.engine_idle:.0%}",
            f"{row.discarded:.1%}",
        )
    console().print(table)
    out("speed: against the first row; /GPU-h: iterations a GPU hour; waits: the trainer; idle: slots of the engine;")
    out(f"lost: slot time of attempts that were not trained on. {rows[0].hours:.2f} simulated hours in the first row")
    console().print("\nage of what was trained on, in versions: share of rollouts", highlight=False)
    for row in rows:
        shares = "  ".join(f"{age}: {share:.1%}" for age, share in row.ages.items())
        out(f"  {row.mode:<12}{row.staleness:>2}{row.replicas:>6}   {shares}")
