"""`roundhouse simulate`: compare ways of asynchrony in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    NewStoreOption,
    Overrides,
    console,
    out,
    out_json,
    print_table,
)


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
    from roundhouse.plugins.lab.simulation.comparison import as_json as rows_as_json
    from roundhouse.plugins.lab.simulation.comparison import compare, recorded_scenario, variants
    from roundhouse.plugins.lab.simulation.scenario import scenario_tree
    from roundhouse.store.run import load_run

    base = recorded_scenario(load_run(store, from_run)) if from_run is not None else None
    tree = scenario_tree(config, overrides or [], base)
    rows = compare(list(variants(tree, mode or [], staleness or [], replicas or [])))
    if as_json:
        out_json(rows_as_json(rows))
    else:
        columns = ("mode", "bound", "replicas", "iter/h", "speed", "/GPU-h", "waits", "idle", "lost")
        cells = (
            (
                row.mode,
                row.staleness,
                row.replicas,
                f"{row.iterations_per_hour:.2f}",
                f"{row.speedup:.2f}×",
                f"{row.iterations_per_gpu_hour:.3f}",
                f"{row.trainer_wait:.0%}",
                f"{row.engine_idle:.0%}",
                f"{row.discarded:.1%}",
            )
            for row in rows
        )
        print_table(columns, cells, right=columns[1:])
        out(
            "speed: against the first row; /GPU-h: iterations a GPU hour; waits: the trainer; idle: slots of the engine;"
        )
        out(
            f"lost: slot time of attempts that were not trained on. {rows[0].hours:.2f} simulated hours in the first row"
        )
        console().print("\nage of the trained rollouts in versions, as shares", highlight=False)
        for row in rows:
            shares = "  ".join(f"{age}: {share:.1%}" for age, share in row.ages.items())
            out(f"  {row.mode:<12}{row.staleness:>2}{row.replicas:>6}   {shares}")
