"""`roundhouse train | quickstart | collect | evaluate`: the flows, with the local services that they need."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from roundhouse import plugins
from roundhouse.cli.options import (
    ConfigPath,
    DryRun,
    JsonOption,
    Overrides,
    console,
    error_console,
    load,
    out,
    out_json,
    store_name,
    store_option,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from roundhouse.config.models import RunConfig
    from roundhouse.store.run import Run
    from roundhouse.store.stage import Reference

T = TypeVar("T")

app = typer.Typer()
PLOT = "learning-curve.png"


@app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="Run configuration (YAML); or --data, --reward, --model.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Rows instead of a configuration: a .jsonl, .csv or .parquet file, or hf:NAME.")
    ] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="With --data: file.py:function that returns rewards; may be repeated.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --data: directory of the model, or smollm2-135m-instruct.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="With --data: column of the prompt.")] = "prompt",
    heldout: Annotated[float, typer.Option(help="With --data: share of the prompts held out.", min=0, max=1)] = 0.2,
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Start a training run, or continue it after its last complete stage."""
    if config is not None:
        if data is not None or reward or model is not None:
            raise typer.BadParameter(
                "A configuration and --data, --reward or --model are given. Give one or the other."
            )
        return train_run(ready(load(config, overrides), dry_run), dry_run, hints=[])
    missing = [name for name, value in (("data", data), ("reward", reward), ("model", model)) if not value]
    if data is None or not reward or model is None:
        raise typer.BadParameter(f"Name a configuration, or add --{', --'.join(missing)}.")
    return _train_rows(data, reward, model, prompt, heldout, overrides or [], dry_run)


def _train_rows(
    data: str, rewards: list[str], model: str, prompt: str, heldout: float, overrides: list[str], dry_run: bool
) -> None:
    """Train on rows and reward functions with the defaults for this machine, and print the keys."""
    import yaml

    from roundhouse.config.from_rows import rows_tree
    from roundhouse.config.loading import load_tree

    tree = rows_tree(data, rewards, model, prompt, heldout)
    config = load_tree(tree, overrides, "--data, --reward and --model")
    ready(config, dry_run, tries_verifier=True)
    if not dry_run:
        text = yaml.safe_dump(tree, sort_keys=False)
        out(
            f"# {config.run_id}.yaml: save this, change it, and start it with `roundhouse train {config.run_id}.yaml`.\n{text}"
        )
    train_run(config, dry_run, hints=[])


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
        "roundhouse runs export-model quickstart --output model/  the trained model as a Hugging Face directory",
        "docs/concepts.md                           what this run did, and where its files are",
        "roundhouse down                            stop the Prefect and MLflow pages",
    ]
    train_run(ready(load(config, overrides), dry_run), dry_run, hints)


@app.command()
def collect(
    config: ConfigPath,
    name: Annotated[str, typer.Option(help="Name of the dataset.", callback=store_name)] = "offline",
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
    as_json: JsonOption = False,
) -> None:
    """Collect rollouts with a run's checkpoint into a separate dataset, without training."""
    from roundhouse.infra.consents import record_consent
    from roundhouse.stages.datasets import open_to_collect
    from roundhouse.stages.preflight import refuse_no_checkpoint
    from roundhouse.store.stage import read_manifest

    resolved = load(config, overrides)
    if promoted and version is not None:
        raise typer.BadParameter("--version and --promoted both name a checkpoint: give one.")
    refuse_no_checkpoint(resolved, version, promoted=promoted, draws=True)
    open_to_collect(resolved)
    record_consent(resolved)

    def work() -> Reference:
        from roundhouse_flows._prefect.tuning import tagged
        from roundhouse_flows.on_demand import collect as flow

        return tagged(flow, f"run:{resolved.run_id}", f"dataset:{name}")(
            resolved,
            name,
            iteration,
            version,
            keep_last=keep_last,
            checkpoint="promoted" if promoted else "newest",
            keep_days=keep_days,
        )

    reference = _watched(resolved, work)
    metrics = read_manifest(reference).metrics
    if as_json:
        return out_json({"uri": reference.uri, "metrics": metrics})
    out(f"{reference.uri}\n{_rollouts_line(read_manifest(reference).counts, metrics)}")
    return out(f"Look at them: roundhouse view datasets/{name}{store_option(resolved.store)}")


@app.command()
def evaluate(
    config: ConfigPath,
    version: Annotated[int | None, typer.Option(help="Policy version; the newest when left out.")] = None,
    overrides: Overrides = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run's checkpoint on held-out tasks."""
    from roundhouse.infra.consents import record_consent
    from roundhouse.stages.preflight import refuse_no_checkpoint
    from roundhouse.stages.task_survey import input_digests
    from roundhouse.store.run import open_run

    resolved = load(config, overrides)
    refuse_no_checkpoint(resolved, version)
    open_run(resolved, inputs=input_digests(resolved))
    record_consent(resolved)

    def work() -> Reference:
        from roundhouse_flows._prefect.tuning import tagged
        from roundhouse_flows.on_demand import evaluate as flow

        return tagged(flow, f"run:{resolved.run_id}")(resolved, version)

    from roundhouse.store.stage import read_manifest

    reference = _watched(resolved, work)
    metrics = read_manifest(reference).metrics
    if as_json:
        return out_json({"uri": reference.uri, "metrics": metrics})
    counts, own = read_manifest(reference).counts, {key.removeprefix("evaluation/"): metrics[key] for key in metrics}
    out(f"version {reference.policy_version}, held out: {_rollouts_line(counts, own)}")
    return out(f"Look at them: roundhouse view {resolved.run_id}{store_option(resolved.store)}")


def _rollouts_line(counts: dict[str, int], metrics: dict[str, float]) -> str:
    """Return rollouts by outcome, their mean reward and turns in one line."""
    from roundhouse.console import failed_parts, mean_text
    from roundhouse.stages.report import LEDGER

    outcomes = ", ".join(f"{counts[name]} {name}" for name in LEDGER if counts.get(name))
    reward = mean_text({"reward_mean": metrics.get("reward/mean"), "reward_stderr": metrics.get("reward/stderr")})
    parts = [f"rollouts: {outcomes}", f"reward {reward}", f"turns {metrics.get('rollout/turns_mean', 0.0):.2f}"]
    return "  ".join([*parts, *failed_parts(metrics)])


def ready(config: RunConfig, dry_run: bool, *, tries_verifier: bool = False) -> RunConfig:
    """Return a configuration of this command line, whose code may be loaded, unless it cannot begin.

    Args:
        tries_verifier: let the verifier judge a first answer, as a dry run does.
    """
    from rich.markup import escape

    from roundhouse.console import RunView
    from roundhouse.infra.consents import record_consent
    from roundhouse.stages.preflight import prompt_warnings, refuse_unready, verifier_warnings
    from roundhouse.stages.task_survey import task_warnings

    if not dry_run:
        record_consent(config)
    with RunView(error_console()) as view:
        view.expect("checking the configuration, its environment and policy")
        refuse_unready(config, remote=not dry_run)
        warnings = task_warnings(config, remote=not dry_run)
        warnings += prompt_warnings(config, remote=not dry_run)
        warnings = [*warnings, *(verifier_warnings(config) if dry_run or tries_verifier else ())]
    for warning in warnings:
        error_console().print(f"[yellow]Warning:[/] {escape(warning)}", highlight=False)
    return config


def train_run(config: RunConfig, dry_run: bool, hints: list[str]) -> None:
    """Train in the foreground, and show it."""
    from roundhouse.config.defaults import rate_notes
    from roundhouse.stages.machine_fit import policy_notes

    if dry_run:
        from roundhouse.config.loading import config_yaml
        from roundhouse.config.placement import placement

        plan = "".join(f"# {place}\n" for place in placement(config))
        notes = "".join(f"# {note}\n" for note in [*rate_notes(config), *policy_notes(config)])
        out(f"# Where the roles are:\n{plan}{notes}{config_yaml(config)}")
        return
    from rich.markup import escape

    from roundhouse.console import RunView, print_summary
    from roundhouse.imports import gc_paused
    from roundhouse.stages.report import reaches_target
    from roundhouse.stages.task_survey import input_digests
    from roundhouse.store.lease import driving
    from roundhouse.store.run import open_run

    terminal = console()
    run = open_run(config, first_start=True, inputs=input_digests(config))
    # Whether it may be continued was decided right here; the flow only resumes.
    config = config.model_copy(update={"resume": type(config.resume)()})
    summary, iterations = run.summary(), iterations_of(run)
    if summary is None or (summary["iterations"] < iterations and not reaches_target(run, summary["iterations"])):
        with RunView(terminal, iterations, run.first_version, run.run_id) as view:
            place, plural = run.location.uri.removeprefix("file://"), "" if iterations == 1 else "s"
            view.say(f"[bold]{config.run_id}[/]: {iterations} iteration{plural}, store {escape(place)}")
            if (newest := run.latest_checkpoint()) is not None and newest.policy_version > run.first_version:
                view.say(f"  resumes after iteration {newest.policy_version}")
            if run.parent is not None:
                view.say(f"  forked from run {run.parent.run_id} at version {run.parent.version}")
            for note in [*rate_notes(run.config), *policy_notes(run.config)]:
                view.say(f"  {note}")

            def work() -> dict[str, Any]:
                view.activity("loading the workflow")
                with gc_paused():
                    from roundhouse_flows._prefect.tuning import tagged
                    from roundhouse_flows.train import training_flow

                return tagged(training_flow(config), f"run:{config.run_id}")(config)

            with driving(run.location):  # known before anything is started; the flow drives under the same lease
                try:
                    summary = _with_services(config, work)
                except Exception:
                    print_symptoms(run)
                    raise
    else:
        terminal.print(f"Run {config.run_id} is finished. A new one: --set run_id=<name>", highlight=False)
        if summary.get("mlflow_complete") is False:
            track(run)
            summary = run.summary() or summary
    print_summary(terminal, summary, links(run), hints)
    print_symptoms(run)


def print_symptoms(run: Run) -> None:
    """Print the symptoms of a run's newest iterations, if a plug-in looks for them."""
    if "symptoms" in plugins.names("operation"):
        plugins.factory("operation", "symptoms")(run)


def track(run: Run) -> bool:
    """Write a run's missing data to MLflow and return whether it then has everything. Unless a server is named, the
    local one starts."""
    from roundhouse.infra.services import local_services, state_directory
    from roundhouse.tracking.mlflow import server_of
    from roundhouse.tracking.tracker import catch_up

    if server_of(run) is not None:
        return catch_up(run)
    own = {"mlflow": run.config.infra.server_arguments()["mlflow"]}
    with local_services(state_directory(run.config), ("mlflow",), keep=("mlflow",), arguments=own) as services:
        os.environ.update(services.environment())
        return catch_up(run)


def mlflow_server(state: Path) -> str | None:
    """Address of the tracking server of the environment or, if it is ready, of the local services."""
    from roundhouse.infra import services

    running = services.status(state / "services")
    local = running.mlflow_url if running.is_ready("mlflow") else None
    return os.environ.get("MLFLOW_TRACKING_URI") or local


def close_ended_pages(runs: list[Run], state: Path) -> None:
    """Close the MLflow pages that ended runs left open. A server elsewhere that does not answer costs a few seconds; the local
    one is known to run, and its first answer may take as long as it loads."""
    if not runs:
        return
    from roundhouse.tracking.ended_runs import close_pages

    elsewhere = "MLFLOW_TRACKING_URI" in os.environ
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5" if elsewhere else "60")
    if closed := close_pages(runs, mlflow_server(state)):
        error_console().print(f"MLflow now shows how these runs ended: {', '.join(closed)}", highlight=False)


def iterations_of(run: Run) -> int:
    """Return the run's number of iterations; with epochs, at most as many as they have batches."""
    if run.config.offline is None:
        from roundhouse.stages.collect import with_epochs

        return with_epochs(run).config.iterations
    from roundhouse.stages.offline import with_iterations

    return with_iterations(run).config.iterations


def _watched(config: RunConfig, work: Callable[[], T]) -> T:
    """Run `work` with the services up, and show how far it is: on stderr, since stdout has the result."""
    from roundhouse.console import RunView

    with RunView(error_console()) as view:
        view.activity("loading the workflow")
        return _with_services(config, work)


def _with_services(config: RunConfig, work: Callable[[], T]) -> T:
    """Run `work` with the local services up; the pages stay, the engine's memory is released."""
    from roundhouse.infra.services import services_of

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    with services_of(config):
        import roundhouse_flows._prefect.tuning  # noqa: F401 - before all else of Prefect
        from roundhouse_flows._prefect.delivery import deliver_queued_records

        try:
            return work()
        finally:
            deliver_queued_records()


def _terminate(number: int, frame: FrameType | None) -> None:
    """End as after Ctrl-C: release the lease, the services and their processes."""
    from roundhouse.cli import TERMINATED

    raise SystemExit(TERMINATED)


def links(run: Run) -> dict[str, str]:
    """Return the links to the run."""
    from roundhouse.api.checkpoints import model_uri
    from roundhouse.infra import services

    place = run.location.uri.removeprefix("file://")
    links = {"store": place}
    if (newest := run.latest_checkpoint()) is not None:
        links["model"] = model_uri(newest)
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
