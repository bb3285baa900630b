"""The `roundhouse` command. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from roundhouse.errors import RoundhouseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from roundhouse.config.models import RunConfig
    from roundhouse.infra.state import ServiceRecord
    from roundhouse.store.run import Run

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning as a durable workflow.",
)
runs_app = typer.Typer(no_args_is_help=True, help="Look at the runs of a store.")
app.add_typer(runs_app, name="runs")

ConfigPath = Annotated[Path, typer.Argument(help="Run configuration (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: --set train.optimizer.learning_rate=1e-4")
]
StateOption = Annotated[
    Path, typer.Option("--state", help="Directory of local state (infra.state of a configuration).")
]
StoreOption = Annotated[str, typer.Option("--store", help="The store: a path, file:// or s3:// URI.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for a program.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

DEFAULT_STATE = Path(".roundhouse")
DEFAULT_STORE = ".roundhouse/store"


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Start a training run, or continue it after its last complete stage."""
    _train(_load(config, overrides), dry_run, hints=[])


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
    _train(_load(config, overrides), dry_run, hints)


@app.command()
def collect(
    config: ConfigPath,
    name: Annotated[str, typer.Option(help="Name of the dataset.")] = "offline",
    iteration: Annotated[
        int, typer.Option(help="Which draw of tasks: the same number gives the same tasks.", min=1)
    ] = 1,
    overrides: Overrides = None,
) -> None:
    """Collect rollouts with a run's newest checkpoint into a dataset of its own, without training."""
    from roundhouse.store.stage import read_manifest

    resolved = _load(config, overrides)

    def work() -> None:
        from flows.collect import collect as flow
        from flows.economy import tagged

        reference = tagged(flow, f"run:{resolved.run_id}", f"dataset:{name}")(resolved, name, iteration)
        _out(f"{reference.uri}\n{json.dumps(read_manifest(reference).metrics, indent=1)}")

    _with_services(resolved, work)


@app.command()
def evaluate(
    config: ConfigPath,
    version: Annotated[int | None, typer.Option(help="Policy version; the newest when left out.")] = None,
    overrides: Overrides = None,
) -> None:
    """Evaluate a run's checkpoint on held-out tasks."""
    resolved = _load(config, overrides)

    def work() -> None:
        from flows.economy import tagged
        from flows.evaluate import evaluate as flow
        from roundhouse.store.stage import read_manifest

        reference = tagged(flow, f"run:{resolved.run_id}")(resolved, version)
        _out(json.dumps(read_manifest(reference).metrics, indent=1))

    _with_services(resolved, work)


@runs_app.command("list")
def runs_list(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """All runs of a store."""
    from roundhouse.stages.report import summarize
    from roundhouse.store.run import load_run, run_ids

    summaries = [summarize(load_run(store, run_id)) for run_id in run_ids(store)]
    if as_json:
        _out(json.dumps(summaries, indent=1))
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
    _console().print(table)


@runs_app.command("show")
def runs_show(run_id: str, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """One run: evaluations, seconds by stage, ledger."""
    from roundhouse.stages.report import summarize
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    summary = summarize(run)
    if as_json:
        _out(json.dumps(summary, indent=1))
        return
    from roundhouse.console import print_summary

    print_summary(_console(), summary, _links(run), [])


@app.command()
def up(state: StateOption = DEFAULT_STATE) -> None:
    """Start the local services (Prefect, MLflow, Ray) and leave them running."""
    from roundhouse.infra import services

    console = _console()
    started = services.up(
        state / "services",
        on_progress=lambda record: console.print(
            f"  {record.name:<8} {record.status:<9} {record.url}", highlight=False
        ),
    )
    for name, value in started.environment().items():
        if name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            console.print(f"export {name}={value}", highlight=False, soft_wrap=True)


@app.command()
def down(state: StateOption = DEFAULT_STATE) -> None:
    """Stop the local services."""
    from roundhouse.infra import services

    stopped = services.down(state / "services")
    _console().print(f"stopped: {', '.join(stopped) or 'nothing was running'}")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Run configuration to check for.")] = None,
    overrides: Overrides = None,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """What is missing or unreachable on this machine, and what to do about it."""
    from roundhouse.infra.doctor import diagnose

    findings = diagnose(None if config is None else _load(config, overrides), state)
    if as_json:
        _out(json.dumps([finding.model_dump() for finding in findings], indent=1))
    else:
        marks = {"ok": "[green]ok[/]  ", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
        for finding in findings:
            remedy = f"\n       → {finding.remedy}" if finding.remedy else ""
            _console().print(f"{marks[finding.status]} {finding.name}: {finding.detail}{remedy}", highlight=False)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: errors that a person can act on are shown without a traceback."""
    try:
        app()
    except RoundhouseError as error:
        _error_console().print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _error_console().print("\ninterrupted; the same command goes on where this one stopped")
        raise


def _train(config: RunConfig, dry_run: bool, hints: list[str]) -> None:
    if dry_run:
        from roundhouse.config.loading import config_yaml

        _out(config_yaml(config))
        return
    from roundhouse.console import RunView, print_summary
    from roundhouse.store.run import open_run

    console = _console()
    run = open_run(config)
    summary = run.summary()
    if summary is None or summary["iterations"] < config.iterations:
        with RunView(console, config.iterations) as view:
            view.say(f"[bold]{config.run_id}[/]: {config.iterations} iterations, store {run.location.uri}")

            def work() -> dict[str, Any]:
                from flows.economy import tagged
                from flows.train import train as flow

                return tagged(flow, f"run:{config.run_id}")(config)

            summary = _with_services(config, work)
    else:
        console.print(f"Run {config.run_id} is finished. A new one: --set run_id=<name>", highlight=False)
    print_summary(console, summary, _links(run), hints)


def _with_services(config: RunConfig, work: Callable[[], T]) -> T:
    """Run `work` with the local services up; the pages stay, the engine's memory is given back."""
    from roundhouse.infra.services import local_services, state_directory
    from roundhouse.progress import announce

    states: dict[str, str] = {}

    def on_progress(record: ServiceRecord) -> None:
        states[record.name] = record.status
        announce("services", text=", ".join(f"{name} {status}" for name, status in states.items()))

    with local_services(state_directory(config), keep=("prefect", "mlflow"), on_progress=on_progress) as services:
        own_tracking = {"MLFLOW_TRACKING_URI": uri} if (uri := os.environ.get("MLFLOW_TRACKING_URI")) else {}
        os.environ.update(services.environment() | own_tracking)
        _quiet_libraries()
        announce("pages", prefect=services.prefect_ui_url, mlflow=services.mlflow_url)
        from flows.delivery import deliver_queued_records

        try:
            return work()
        finally:
            deliver_queued_records()


def _quiet_libraries() -> None:
    """Their logs go to Prefect and to files; the terminal shows the run."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    from roundhouse.config.loading import load_config

    return load_config(path, overrides or [])


def _links(run: Run) -> dict[str, str]:
    """Where a person finds the run."""
    from roundhouse.infra import services

    place = run.location.uri.removeprefix("file://")
    links = {"store": place, "plot": f"{place}/learning-curve.png"}
    running = services.status(services.state_directory(run.config))
    if running.is_ready("prefect"):
        links["Prefect"] = running.prefect_ui_url
    if running.is_ready("mlflow"):
        links["MLflow"] = (run.summary() or {}).get("mlflow_url") or running.mlflow_url
    if len(links) == 2:
        links["pages"] = "start them again with `roundhouse up`"
    return links


def _reward(evaluation: dict[str, Any] | None) -> str:
    return "–" if evaluation is None else f"{evaluation['reward_mean']:.3f} ± {evaluation['reward_stderr']:.3f}"


def _console() -> Console:
    from rich.console import Console

    return Console()


def _error_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _out(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
