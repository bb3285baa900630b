"""`roundhouse runs`: look at what a store holds, and go on from it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    DryRun,
    JsonOption,
    NewStoreOption,
    Overrides,
    StateOfStoreOption,
    StoreOption,
    TrustStore,
    accept_code,
    console,
    out,
    state_of,
)
from roundhouse.cli.prefect import at_prefect, find_prefect
from roundhouse.cli.training import links, train_run

app = typer.Typer(no_args_is_help=True, help="Look at the runs of a store; fork and resume them.")


@app.command("list")
def runs_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """All runs of a store."""
    from roundhouse.errors import StoreError
    from roundhouse.stages.report import summarize
    from roundhouse.store.location import Location
    from roundhouse.store.run import load_run, run_ids

    if not (there := run_ids(store)):
        raise StoreError(f"No run is in {Location(store).uri}.")
    summaries = [summarize(load_run(store, run_id)) for run_id in there]
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
    run_id: str,
    overrides: Overrides = None,
    budget: Annotated[
        list[str] | None, typer.Option(help="Raise a limit of cost.budget first: --budget gpu_hours=10.")
    ] = None,
    comment: Annotated[str, typer.Option(help="Why the budget is raised; kept with it.")] = "",
    store: StoreOption = DEFAULT_STORE,
    dry_run: DryRun = False,
    trust_store: TrustStore = False,
) -> None:
    """Go on with a run after its last complete stage: let its paused flow run go on, or train it here.

    The configuration is the store's, but for what --set changes.
    """
    if budget and not dry_run:
        from roundhouse.cli.decisions import raise_limits

        raise_limits(store, run_id, budget, comment)
    if not (overrides or dry_run) and find_prefect(state_of(store, None)):
        from flows.controls import resume

        if (flow_run := resume(run_id)) is not None:
            out(f"{run_id}: its paused flow run {flow_run} goes on")
            return
    from roundhouse.config.loading import apply_override, parse_config
    from roundhouse.store.run import load_run

    tree = load_run(store, run_id).config.model_dump(mode="json") | {"store": store, "resume": {"mode": "auto"}}
    for override in overrides or []:
        apply_override(tree, override)
    config = parse_config(tree, origin=f"run {run_id}")
    if not dry_run:
        accept_code(config, overrides, trust_store)
    train_run(config, dry_run, hints=[])


@app.command("track")
def runs_track(run_id: str, store: StoreOption = DEFAULT_STORE) -> None:
    """Write to MLflow what it lacks of a run: after it was away, or to another server (MLFLOW_TRACKING_URI)."""
    from roundhouse.cli.training import track
    from roundhouse.errors import InfraError
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    if not run.config.tracking.enabled:
        out(f"Run {run_id} is not tracked: tracking.enabled is false.")
    elif track(run):
        out(f"MLflow has all of run {run_id}.")
    else:
        raise InfraError(f"MLflow lacks a part of run {run_id}. Is the server up? See `roundhouse doctor`.")


@app.command("pause")
def runs_pause(run_id: str, store: NewStoreOption = DEFAULT_STORE, state: StateOfStoreOption = None) -> None:
    """Let a run that a deployment started stop at the next border of a stage."""
    at_prefect(state_of(store, state))
    from flows.controls import pause

    out(f"{run_id}: flow run {pause(run_id)} stops at the next border. Go on: roundhouse runs resume {run_id}")


@app.command("cancel")
def runs_cancel(run_id: str, store: NewStoreOption = DEFAULT_STORE, state: StateOfStoreOption = None) -> None:
    """End all processes of a run that a deployment started; it stays resumable."""
    at_prefect(state_of(store, state))
    from flows.controls import cancel

    out(f"{run_id}: flow run {cancel(run_id)} is being cancelled. Go on: roundhouse runs retry {run_id}")


@app.command("retry")
def runs_retry(run_id: str, store: NewStoreOption = DEFAULT_STORE, state: StateOfStoreOption = None) -> None:
    """Run a failed, crashed or cancelled flow run again; it goes on at the stage where it was."""
    at_prefect(state_of(store, state))
    from flows.controls import retry

    out(f"{run_id}: flow run {retry(run_id)} runs again")


@app.command("fork")
def runs_fork(
    run_id: Annotated[str, typer.Argument(help="The parent.")],
    new: Annotated[str, typer.Option("--run-id", help="Id of the new run.")],
    at: Annotated[int | None, typer.Option(help="Iteration to go on from; the newest when left out.", min=0)] = None,
    overrides: Overrides = None,
    store: StoreOption = DEFAULT_STORE,
    train: Annotated[bool, typer.Option("--train", help="Train it right away.")] = False,
    dry_run: DryRun = False,
    trust_store: TrustStore = False,
) -> None:
    """A new run from an iteration of another: weights, trainer state, and configuration but for what --set changes."""
    from roundhouse.stages.fork import fork_config, fork_run

    config = fork_config(store, run_id, new, at, overrides or [])
    if dry_run:
        train_run(config, dry_run, hints=[])
        return
    if train:
        accept_code(config, overrides, trust_store)
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
