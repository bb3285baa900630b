"""`roundhouse runs`: look at what a store holds."""

from __future__ import annotations

import json
from typing import Any

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out
from roundhouse.cli.training import links

app = typer.Typer(no_args_is_help=True, help="Look at the runs of a store.")


@app.command("list")
def runs_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """All runs of a store."""
    from roundhouse.stages.report import summarize
    from roundhouse.store.run import load_run, run_ids

    summaries = [summarize(load_run(store, run_id)) for run_id in run_ids(store)]
    if as_json:
        out(json.dumps(summaries, indent=1))
        return
    from rich.table import Table

    table = Table("run", "environment", "iterations", "held-out before", "after", box=None)
    for summary in summaries:
        evaluation = summary["evaluation"]
        table.add_row(
            summary["run_id"],
            summary["environment"],
            f"{summary['iterations']}/{summary['iterations_wanted']}",
            _reward(evaluation["before"]),
            _reward(evaluation["after"]),
        )
    console().print(table)


@app.command("show")
def runs_show(run_id: str, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """One run: evaluations, seconds by stage, ledger."""
    from roundhouse.stages.report import summarize
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    summary = summarize(run)
    if as_json:
        out(json.dumps(summary, indent=1))
        return
    from roundhouse.console import print_summary

    print_summary(console(), summary, links(run), [])


def _reward(evaluation: dict[str, Any] | None) -> str:
    return "–" if evaluation is None else f"{evaluation['reward_mean']:.3f} ± {evaluation['reward_stderr']:.3f}"
