"""`roundhouse up | down | doctor`: this machine's services."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from roundhouse.cli.options import DEFAULT_STATE, JsonOption, Overrides, StateOption, console, load, out_json

app = typer.Typer()


@app.command()
def up(
    config: Annotated[
        Path | None, typer.Argument(help="Run configuration whose infra section names state directory and databases.")
    ] = None,
    overrides: Overrides = None,
    state: StateOption = DEFAULT_STATE,
    ray: Annotated[
        bool, typer.Option("--ray", help="Keep Ray up too: an engine then outlives its run, and is there at once.")
    ] = False,
) -> None:
    """Start Prefect, MLflow and the deployments, so that the Prefect page can run them, and leave all running."""
    from roundhouse.infra import services
    from roundhouse.infra.state import PREFECT_AUTH_FILE

    terminal = console()
    infra = None if config is None else load(config, overrides).infra
    state = state if infra is None else Path(infra.state)
    started = services.up(
        state / "services",
        (*services.STANDING_SERVICES, *(["ray"] if ray else [])),
        arguments={} if infra is None else services.server_arguments(infra),
        on_progress=lambda record: terminal.print(
            f"  {record.name:<11} {record.status:<9} {record.url}", highlight=False, markup=False
        ),
    )
    variables = started.environment()
    password = f"cat {shlex.quote(str(state.expanduser() / 'services' / PREFECT_AUTH_FILE))}"
    for line in (
        f"export PREFECT_API_URL={variables['PREFECT_API_URL']}",
        f'export PREFECT_API_AUTH_STRING="$({password})"',
        f"export MLFLOW_TRACKING_URI={variables['MLFLOW_TRACKING_URI']}",
        f"To sign in to the Prefect page, open {started.prefect_sign_in_url}, or paste what this prints: {password}",
    ):
        terminal.print(line, highlight=False, soft_wrap=True, markup=False)


@app.command()
def down(state: StateOption = DEFAULT_STATE) -> None:
    """Stop the local services."""
    from roundhouse.infra import services

    stopped = services.down(state / "services")
    console().print(f"stopped: {', '.join(stopped) or 'nothing was running'}")


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Run configuration to check for.")] = None,
    overrides: Overrides = None,
    state: StateOption = DEFAULT_STATE,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Look at the cluster of infra or KUBECONFIG instead of this machine.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Plan the configuration's training step for this GPU: h100, L40S, or 96GB."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="How many of them; default: the ranks of train.service.", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What is missing or unreachable on this machine or cluster, and what to do about it."""
    if (device or gpus) and config is None:
        raise typer.BadParameter("--device plans a run's memory: name its configuration.")
    if gpus and not device:
        raise typer.BadParameter("--gpus goes with --device, such as --device h100.")
    from rich.markup import escape

    from roundhouse.infra.checks import diagnose, diagnose_cluster

    resolved = None if config is None else load(config, overrides)
    findings = diagnose_cluster(resolved) if kubernetes else diagnose(resolved, state, device, gpus)
    if as_json:
        out_json([finding.model_dump() for finding in findings])
    else:
        marks = {"ok": "[green]ok[/]  ", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}
        for finding in findings:
            remedy = f"\n       → {finding.remedy}" if finding.remedy else ""
            said = escape(f"{finding.name}: {finding.detail}{remedy}")
            console().print(f"{marks[finding.status]} {said}", highlight=False)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)
