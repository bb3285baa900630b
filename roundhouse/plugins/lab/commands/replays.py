"""`roundhouse replay | replays`: run recorded stages again, and look at what came out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    JsonOption,
    Overrides,
    StoreOption,
    TrustStore,
    accept_code,
    console,
    figure,
    out,
    out_json,
    print_table,
    store_name,
)
from roundhouse.plugins.lab.commands import DIFFERS, progress, span_of

if TYPE_CHECKING:
    from roundhouse.plugins.lab.replays.comparison import Comparison

replays_app = typer.Typer(no_args_is_help=True, help="Replays of a store's runs: what came out of them.")

METRICS_SHOWN = 6

ReplayedStages = Annotated[
    list[str] | None,
    typer.Option(help="collect, validate, train or evaluate; may be repeated. Left out: validate and train."),
]
ReplayInputs = Annotated[
    list[str] | None,
    typer.Option("--input", help="rollouts=<re-scored dataset | path | iteration:7>, base=<version>."),
]
ReplayName = Annotated[str, typer.Argument(metavar="NAME", help="A replay.")]


def replay_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run; its stages run again.")],
    iterations: Annotated[str, typer.Option(help="first:last, such as 10:20, or one iteration.")],
    stage: ReplayedStages = None,
    overrides: Overrides = None,
    inputs: ReplayInputs = None,
    name: Annotated[
        str | None, typer.Option(help="Of the replay; left out, it follows from the rest.", callback=store_name)
    ] = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option("--gate", help="A bound of the drift gate, such as max_kl=0.2; may be repeated."),
    ] = None,
    gated: Annotated[
        bool, typer.Option("--drift-gate/--no-drift-gate", help="Stop when the data no longer fits the policy.")
    ] = True,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Run recorded stages again, with or without substitutions, and compare them with the original.

    The replay is in replays/<name> of the store; the run is only read. The same command resumes it. Exits with 1 if a
    replay without substitutions differs, with 65 if the drift gate stopped it.
    """
    from roundhouse.errors import DataError
    from roundhouse.infra.services import services_of
    from roundhouse.plugins.lab.replays import replay
    from roundhouse.plugins.lab.replays.comparison import DriftGate
    from roundhouse.plugins.lab.replays.stages import SAMPLING, substituted_config
    from roundhouse.store.run import load_run

    gate = DriftGate.parse(bounds or []) if gated or bounds else None
    substituted = dict(each.partition("=")[::2] for each in inputs or [])
    if not all(substituted.values()):
        raise typer.BadParameter("--input takes name=value, such as rollouts=mended.")
    config = substituted_config(load_run(store, run_id).config, overrides or [])
    accept_code(config, overrides, trust_store)
    stages = stage or ["validate", "train"]
    with services_of(config) if set(stages) & set(SAMPLING) else nullcontext():
        comparison = replay(
            store,
            run_id,
            span_of(iterations),
            stages,
            overrides=overrides or [],
            inputs=substituted,
            name=name,
            gate=gate,
            say=progress,
        )
    out_json(comparison.as_json()) if as_json else _show(comparison)
    if comparison.stopped is not None:
        raise DataError(
            f"Stopped at iteration {comparison.stopped['iteration']}, because its recorded rollouts no longer fit the policy: "
            f"{'; '.join(comparison.stopped['reasons'])}. The versions before it are in {comparison.uri}. Raise the bound with "
            "--gate, or collect again from there."
        )
    if not comparison.equal and not comparison.substituted:
        raise typer.Exit(DIFFERS)


@replays_app.command("list")
def replays_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """All replays of a store."""
    from roundhouse.errors import StoreError
    from roundhouse.plugins.lab.replays.stages import read_comparison
    from roundhouse.store.replays import load_replay, replay_names, request_of

    replays: list[dict[str, Any]] = []
    for name in replay_names(store):
        request = request_of(load_replay(store, name))
        try:
            comparison = read_comparison(store, name)
        except StoreError:
            outcome = "interrupted"
        else:
            stopped, first = comparison["stopped"], comparison["first"]
            outcome = "equal" if first is None else f"differs from iteration {first['iteration']}, {first['stage']}"
            if stopped is not None:
                outcome = f"stopped by drift at {stopped['iteration']}"
        replays.append({"name": name, "request": request, "outcome": outcome})
    if as_json:
        return out_json(replays)
    rows = []
    for each in replays:
        request = each["request"]
        substituted = [*request["set"], *(f"{key}={value}" for key, value in request["inputs"].items())]
        span, stages = ":".join(map(str, request["iterations"])), ", ".join(request["stages"])
        rows.append(
            (each["name"], request["run_id"], span, stages, ", ".join(substituted) or "nothing", each["outcome"])
        )
    return print_table(("replay", "run", "iterations", "stages", "substituted", "outcome"), rows)


@replays_app.command("show")
def replays_show(
    name: ReplayName,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """The comparison of a replay with its original, as JSON."""
    from roundhouse.plugins.lab.replays.stages import read_comparison

    out_json(read_comparison(store, name))


@replays_app.command("delete")
def replays_delete(
    name: ReplayName,
    store: StoreOption = DEFAULT_STORE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a replay with its checkpoints; the run stays as it is."""
    from roundhouse.stages.policy import delete_run
    from roundhouse.store.replays import load_replay

    replayed = load_replay(store, name)
    if not yes:
        typer.confirm(f"Delete {replayed.location.uri}?", abort=True, err=True)
    delete_run(replayed)
    out(f"{name}: deleted")


def _show(found: Comparison) -> None:
    from rich.text import Text

    terminal, rows = console(), []
    for stage in found.stages:
        parts = [f"{name}: {each['changed']} of {each['before']} rows" for name, each in stage.rows.items()]
        parts += [f"weights ({', '.join(stage.weights)})"] if stage.weights else []
        metrics = sorted(stage.metrics)[:METRICS_SHOWN]
        parts += [f"{name} {figure(stage.metrics[name][0])} → {figure(stage.metrics[name][1])}" for name in metrics]
        if len(stage.metrics) > len(metrics):
            parts.append(f"{len(stage.metrics) - len(metrics)} more metrics")
        for name, means in stage.distribution.items():
            distance = means["standard_errors"]
            apart = "neither varies" if distance is None else f"{distance:+.1f} standard errors"
            parts.append(f"{name} {figure(means['before'])} → {figure(means['after'])} ({apart})")
        rows.append((stage.iteration, stage.stage, stage.outcome, "; ".join(parts)))
    print_table(("iteration", "stage", "outcome", "what differs"), rows)
    if found.first is not None:
        terminal.print(Text(f"First difference: iteration {found.first.iteration}, {found.first.stage}", style="bold"))
        for cause in found.first.because:
            terminal.print(Text(f"  because of {cause}"))
    if any(stage.outcome == "distribution" for stage in found.stages):
        terminal.print("collect and evaluate sample from an engine: they cannot be equal, their means are compared.")
    out(found.uri)
