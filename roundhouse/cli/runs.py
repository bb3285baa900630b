"""`roundhouse runs`: look at what a store holds, and go on from it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from roundhouse.cli.options import DEFAULT_STORE, DryRun, JsonOption, Overrides, StoreOption, console, out
from roundhouse.cli.training import links, train_run

app = typer.Typer(no_args_is_help=True, help="Look at the runs of a store; fork and resume them.")


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


@app.command("resume")
def runs_resume(
    run_id: str, overrides: Overrides = None, store: StoreOption = DEFAULT_STORE, dry_run: DryRun = False
) -> None:
    """Go on with a run after its last complete stage, with the configuration that the store has of it."""
    from roundhouse.config.loading import apply_override, parse_config
    from roundhouse.store.run import load_run

    tree = load_run(store, run_id).config.model_dump(mode="json") | {"store": store, "resume": {"mode": "auto"}}
    for override in overrides or []:
        apply_override(tree, override)
    train_run(parse_config(tree, origin=f"run {run_id}"), dry_run, hints=[])


@app.command("fork")
def runs_fork(
    run_id: Annotated[str, typer.Argument(help="The parent.")],
    new: Annotated[str, typer.Option("--run-id", help="Id of the new run.")],
    at: Annotated[int | None, typer.Option(help="Iteration to go on from; the newest when left out.", min=0)] = None,
    overrides: Overrides = None,
    store: StoreOption = DEFAULT_STORE,
    train: Annotated[bool, typer.Option("--train", help="Train it right away.")] = False,
    dry_run: DryRun = False,
) -> None:
    """A new run from an iteration of another: weights, trainer state, and configuration but for what --set changes."""
    from roundhouse.stages.fork import fork_config, fork_run

    config = fork_config(store, run_id, new, at, overrides or [])
    if dry_run:
        train_run(config, dry_run, hints=[])
        return
    fork = fork_run(config)
    assert fork.parent is not None, "a fork has one"
    out(
        f"{new} goes on from {run_id} at version {fork.parent.version}; its next iteration is {fork.parent.version + 1}."
    )
    if train:
        train_run(config, dry_run, hints=[])
    else:
        named = "" if store == DEFAULT_STORE else f" --store {store}"
        out(f"Train it: roundhouse runs resume {new}{named}")


def _reward(evaluation: dict[str, Any] | None) -> str:
    return "–" if evaluation is None else f"{evaluation['reward_mean']:.3f} ± {evaluation['reward_stderr']:.3f}"
