"""`roundhouse train | quickstart | collect | evaluate | simulate`: the flows, with the local services that they need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from roundhouse.cli.options import (
    DEFAULT_STORE,
    ConfigPath,
    DryRun,
    JsonOption,
    NewStoreOption,
    Overrides,
    console,
    error_console,
    load,
    out,
    out_json,
    print_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundhouse.config.models import RunConfig
    from roundhouse.store.run import Run

T = TypeVar("T")

app = typer.Typer()
PLOT = "learning-curve.png"


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Start a training run, or continue it after its last complete stage."""
    train_run(_ready(load(config, overrides), dry_run), dry_run, hints=[])


@app.command()
def quickstart(
    config: Annotated[Path, typer.Option(help="Run configuration (YAML).")] = Path("configs/quickstart.yaml"),
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """From nothing to a policy that has learned to use a tool, on this machine."""
    hints = [
        "roundhouse runs show quickstart            the numbers of this run",
        "roundhouse train configs/single-turn.yaml  a single-turn task",
        "roundhouse train configs/discovery.yaml    a search that no demonstration shows (slower)",
        "docs/concepts.md                           what has just happened, and where it lies",
        "roundhouse down                            stop the Prefect and MLflow pages",
    ]
    train_run(_ready(load(config, overrides), dry_run), dry_run, hints)


@app.command()
def collect(
    config: ConfigPath,
    name: Annotated[str, typer.Option(help="Name of the dataset.")] = "offline",
    iteration: Annotated[
        int, typer.Option(help="Which draw of tasks: the same number gives the same tasks.", min=1)
    ] = 1,
    version: Annotated[int | None, typer.Option(help="Policy version; the newest when left out.", min=0)] = None,
    promoted: Annotated[bool, typer.Option("--promoted", help="With the promoted checkpoint.")] = False,
    keep_last: Annotated[
        int | None, typer.Option(help="Delete all but so many newest versions of the dataset afterwards.", min=1)
    ] = None,
    keep_days: Annotated[
        float | None,
        typer.Option(help="Delete versions older than this afterwards; with both, what either keeps stays."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Collect rollouts with a run's checkpoint into a dataset of its own, without training."""
    from roundhouse.stages.datasets import open_to_collect
    from roundhouse.stages.preflight import refuse_no_checkpoint
    from roundhouse.store.stage import read_manifest

    resolved = load(config, overrides)
    if promoted and version is not None:
        raise typer.BadParameter("--version and --promoted both name a checkpoint: give one.")
    refuse_no_checkpoint(resolved, version, promoted=promoted)
    open_to_collect(resolved)

    def work() -> str:
        from flows._prefect.tuning import tagged
        from flows.on_demand import collect as flow

        reference = tagged(flow, f"run:{resolved.run_id}", f"dataset:{name}")(
            resolved,
            name,
            iteration,
            version,
            keep_last=keep_last,
            checkpoint="promoted" if promoted else "newest",
            keep_days=keep_days,
        )
        return f"{reference.uri}\n{json.dumps(read_manifest(reference).metrics, indent=1)}"

    out(_watched(resolved, work))


@app.command()
def evaluate(
    config: ConfigPath,
    version: Annotated[int | None, typer.Option(help="Policy version; the newest when left out.")] = None,
    overrides: Overrides = None,
) -> None:
    """Evaluate a run's checkpoint on held-out tasks."""
    from roundhouse.stages.preflight import refuse_no_checkpoint
    from roundhouse.store.run import open_run

    resolved = load(config, overrides)
    refuse_no_checkpoint(resolved, version)
    open_run(resolved)

    def work() -> str:
        from flows._prefect.tuning import tagged
        from flows.on_demand import evaluate as flow
        from roundhouse.store.stage import read_manifest

        reference = tagged(flow, f"run:{resolved.run_id}")(resolved, version)
        return json.dumps(read_manifest(reference).metrics, indent=1)

    out(_watched(resolved, work))


def _ready(config: RunConfig, dry_run: bool) -> RunConfig:
    """A configuration of this command line, whose code may be loaded, unless it cannot begin."""
    from roundhouse.stages.preflight import refuse_unready

    refuse_unready(config, remote=not dry_run)
    return config


def train_run(config: RunConfig, dry_run: bool, hints: list[str]) -> None:
    """Train in the foreground, and show it."""
    if dry_run:
        from roundhouse.config.loading import config_yaml
        from roundhouse.config.placement import placement

        plan = "".join(f"# {place}\n" for place in placement(config))
        out(f"# Where the roles are:\n{plan}{config_yaml(config)}")
        return
    from rich.markup import escape

    from roundhouse.console import RunView, print_summary
    from roundhouse.imports import gc_paused
    from roundhouse.stages.report import reaches_target
    from roundhouse.store.lease import driving
    from roundhouse.store.run import open_run

    terminal = console()
    run = open_run(config, first_start=True)
    # Whether it may be continued was decided right here; the flow only resumes.
    config = config.model_copy(update={"resume": type(config.resume)()})
    summary, iterations = run.summary(), iterations_of(run)
    if summary is None or (summary["iterations"] < iterations and not reaches_target(run, summary["iterations"])):
        with RunView(terminal, iterations) as view:
            view.say(f"[bold]{config.run_id}[/]: {iterations} iterations, store {escape(run.location.uri)}")
            if run.parent is not None:
                view.say(f"  forked from run {run.parent.run_id} at version {run.parent.version}")

            def work() -> dict[str, Any]:
                with gc_paused():
                    from flows._prefect.tuning import tagged
                    from flows.train import training_flow

                return tagged(training_flow(config), f"run:{config.run_id}")(config)

            with driving(run.location):  # known before anything is started; the flow drives under the same lease
                summary = _with_services(config, work)
    else:
        terminal.print(f"Run {config.run_id} is finished. A new one: --set run_id=<name>", highlight=False)
        if summary.get("mlflow_complete") is False:
            track(run)
            summary = run.summary() or summary
    print_summary(terminal, summary, links(run), hints)


def track(run: Run) -> bool:
    """Write to MLflow what it lacks of a run; whether it has everything then. Unless one is named, the local server starts."""
    from roundhouse.infra.services import local_services, server_arguments, state_directory
    from roundhouse.tracking.mlflow import server_of
    from roundhouse.tracking.tracker import catch_up

    if server_of(run) is not None:
        return catch_up(run)
    own = {"mlflow": server_arguments(run.config.infra)["mlflow"]}
    with local_services(state_directory(run.config), ("mlflow",), keep=("mlflow",), arguments=own) as services:
        os.environ.update(services.environment())
        return catch_up(run)


def iterations_of(run: Run) -> int:
    """How many the run has at most; with epochs, no more than they have batches."""
    if run.config.offline is None:
        from roundhouse.stages.collect import with_epochs

        return with_epochs(run).config.iterations
    from roundhouse.stages.offline import with_iterations

    return with_iterations(run).config.iterations


def _watched(config: RunConfig, work: Callable[[], T]) -> T:
    """Run `work` with the services up, and show how far it is: on stderr, since stdout has the result."""
    from roundhouse.console import RunView

    with RunView(error_console()):
        return _with_services(config, work)


def _with_services(config: RunConfig, work: Callable[[], T]) -> T:
    """Run `work` with the local services up; the pages stay, the engine's memory is given back."""
    from roundhouse.infra.services import services_of

    with services_of(config):
        import flows._prefect.tuning  # noqa: F401 - before all else of Prefect
        from flows._prefect.delivery import deliver_queued_records

        try:
            return work()
        finally:
            deliver_queued_records()


def links(run: Run) -> dict[str, str]:
    """Where a person finds the run."""
    from roundhouse.infra import services

    place = run.location.uri.removeprefix("file://")
    links = {"store": place}
    if run.location.exists(PLOT):
        links["plot"] = f"{place}/{PLOT}"
    if run.parent is not None:
        links |= {
            "parent": f"run {run.parent.run_id}, version {run.parent.version}, {run.parent.checkpoint.digest[:12]}…"
        }
    pages = dict[str, str]()
    running = services.status(services.state_directory(run.config))
    if running.is_ready("prefect"):
        pages["Prefect"] = running.prefect_ui_url
    if running.is_ready("mlflow"):
        pages["MLflow"] = page = (run.summary() or {}).get("mlflow_url") or running.mlflow_url
        if "/runs/" in page:
            from roundhouse.tracking.mlflow import table_url

            pages["all runs"] = table_url(page)
    return links | (pages or {"pages": "start them again with `roundhouse up`"})


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
    from roundhouse.simulation.comparison import compare, recorded_scenario, variants
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
        console().print("\nage of what was trained on, in versions: share of rollouts", highlight=False)
        for row in rows:
            shares = "  ".join(f"{age}: {share:.1%}" for age, share in row.ages.items())
            out(f"  {row.mode:<12}{row.staleness:>2}{row.replicas:>6}   {shares}")
