"""`roundhouse bisect`: find the iteration and the cause of a fall."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

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
)
from roundhouse.plugins.lab.commands import DIFFERS, progress

if TYPE_CHECKING:
    from roundhouse.plugins.lab.replays.bisect import Bisection


def bisect_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run; its metric fell.")],
    metric: Annotated[str, typer.Option(help="held_out_reward, or reward of the collections.")] = "held_out_reward",
    against: Annotated[
        str | None, typer.Option(help="Run with the right configuration. Default: the parent of a fork.")
    ] = None,
    overrides: Overrides = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Start the run's engine and evaluate replayed versions with it.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave all replays in the store, not only the deciding one.")
    ] = False,
    budget: Annotated[
        int | None,
        typer.Option(help="Stage runs that the smallest set of groups or keys may take; left out, 64.", min=0),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    trust_store: TrustStore = False,
) -> None:
    """Find the iteration that made a metric fall, and the cause: rows, reward code, configuration, weights, engine or
    code.

    It replays the iteration with one correction at a time; --set names a configuration that is assumed correct. Exits
    with 1 if the metric fell.
    """
    from roundhouse.infra.services import services_of
    from roundhouse.plugins.lab.replays.bisect import bisect, right_run
    from roundhouse.plugins.lab.replays.narrowing import NARROWING_BUDGET
    from roundhouse.plugins.lab.replays.stages import substituted_config
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    config = substituted_config(run.config, overrides or [])
    for each in (config, right_run(run, against).config):
        accept_code(each, overrides, trust_store)
    with services_of(config) if evaluate else nullcontext():
        bisection = bisect(
            store,
            run_id,
            metric,
            against=against,
            overrides=overrides or [],
            evaluate=evaluate,
            keep=keep,
            budget=NARROWING_BUDGET if budget is None else budget,
            say=progress,
        )
    out_json(bisection.as_json()) if as_json else _show_bisection(bisection)
    if bisection.fall is not None:
        raise typer.Exit(DIFFERS)


def _show_bisection(found: Bisection) -> None:
    from rich.text import Text

    terminal, fall = console(), found.fall
    if fall is None:
        out(f"{found.metric} of {len(found.values)} versions: no fall that chance does not explain")
        return
    out(
        f"{found.metric} falls from {fall.before:.4g} at version {fall.good} to {fall.after:.4g} at version {fall.bad}, "
        f"{fall.standard_errors:.1f} standard errors"
    )
    rows = []
    for trial in found.trials:
        share = "not measured" if trial.recovered is None else f"{trial.recovered:.0%}"
        rows.append((trial.cause, trial.what, figure(trial.value), share))
    print_table(("put right", "what", found.metric, "recovered"), rows)
    for note in found.notes:
        terminal.print(Text(note, style="yellow"))
    if found.cause:
        terminal.print(Text(f"Cause: {found.cause}, iteration {found.iteration}. {found.detail}", style="bold"))
    elif found.likely:
        terminal.print(
            Text(
                f"Likely cause: {found.likely}, between versions {fall.good} and {fall.bad}. It was not measured: recorded "
                f"rollouts cannot judge its weights. To measure it: roundhouse bisect {found.run_id} "
                f"--metric {found.metric} --evaluate",
                style="bold",
            )
        )
    else:
        terminal.print(
            "No cause: nothing that could be put right gives back half of the fall. Name a configuration with --set."
        )
    bound = f" of at most {found.narrowing_bound}" if found.narrowing_bound else ""
    out(f"{found.stage_runs} stages ran again, {found.narrowing_runs}{bound} more for the smallest set")
