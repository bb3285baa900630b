"""`roundhouse up | down | doctor | train-server`: this machine's services."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import DEFAULT_STATE, JsonOption, Overrides, StateOption, console, load, out_json

if TYPE_CHECKING:
    from roundhouse.config.models import TrainConfig

app = typer.Typer()


@app.command()
def up(
    config: Annotated[
        Path | None,
        typer.Argument(help="Run configuration; its infra section names the state directory and databases."),
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
        arguments={} if infra is None else infra.server_arguments(),
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
        f"To sign in to the Prefect page, open {started.prefect_sign_in_url}, or paste the output of: {password}",
    ):
        terminal.print(line, highlight=False, soft_wrap=True, markup=False)
    if (store := state / "store").is_dir():
        from roundhouse.cli.training import close_ended_pages
        from roundhouse.store.run import readable_runs

        close_ended_pages(readable_runs(str(store)), state)


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
    """Find missing or unreachable parts of this machine or cluster, with remedies."""
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
            text = escape(f"{finding.name}: {finding.detail}{remedy}")
            console().print(f"{marks[finding.status]} {text}", highlight=False)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def train_server(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="Hugging Face directory: the architecture served; default: the first checkpoint's."
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8500,
    processes: Annotated[
        int, typer.Option("--processes", help="Ranks that share the model; each has one GPU.", min=1)
    ] = 1,
    context_parallel: Annotated[int, typer.Option("--context-parallel", help="Ranks to a microbatch.", min=1)] = 1,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", help="Ranks to a matrix.", min=1)] = 1,
    data_parallel_replicate: Annotated[
        int, typer.Option("--data-parallel-replicate", help="Groups of ranks with the whole model each.", min=1)
    ] = 1,
    expert_parallel: Annotated[
        int, typer.Option("--expert-parallel", help="Ranks that have different experts.", min=1)
    ] = 1,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout-seconds", help="Time limit of one verb with several ranks.")
    ] = 3600.0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int, typer.Option("--threads", help="CPU threads; 0 takes one for a small model, else all cores.", min=0)
    ] = 0,
    token_file: Annotated[
        str | None, typer.Option("--token-file", help="Bearer token; else the variable ROUNDHOUSE_TRAIN_TOKEN.")
    ] = None,
    idle_seconds: Annotated[
        float, typer.Option("--idle-seconds", help="Silence that frees it for another run.")
    ] = 3600.0,
    max_body_mib: Annotated[int, typer.Option("--max-body-mib", help="Largest request.", min=1)] = 1024,
) -> None:
    """Train for runs elsewhere, over HTTP: `train.service: {kind: remote, url: …}`."""
    import logging
    import tempfile
    from functools import partial

    from roundhouse.config.secrets import read_secret
    from roundhouse.config.training import TOKEN_VARIABLE
    from roundhouse.launch.resident_ranks import open_ranks
    from roundhouse.training.service import server
    from roundhouse.training.service.served import ServedTrainEngine

    logging.basicConfig(level=logging.INFO)
    layout = {
        "context_parallel": context_parallel,
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
    }
    layout |= {"processes": processes, "data_parallel_replicate": data_parallel_replicate}
    service = {"kind": "resident", "timeout_seconds": timeout_seconds, **layout}
    machine = _train_machine(model, {"device": device, "threads": threads, "service": service})
    token = read_secret(TOKEN_VARIABLE, token_file)
    with tempfile.TemporaryDirectory(prefix="roundhouse-train-") as scratch:
        open_engine = partial(open_ranks, service=machine.service)
        engine = ServedTrainEngine(model, machine, Path(scratch), open_engine=open_engine)
        server.serve(engine, host, port, token=token, idle_seconds=idle_seconds, max_body_bytes=max_body_mib << 20)


def _train_machine(model: Path | None, section: dict[str, Any]) -> TrainConfig:
    """A train server's device, threads and ranks, which can share this model."""
    from pydantic import ValidationError

    from roundhouse.config.models import TrainConfig
    from roundhouse.errors import ConfigError

    try:
        machine = TrainConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError(f"No train server can run so: {error.errors()[0]['msg']}") from error
    if model is not None and machine.parallelism != TrainConfig().parallelism:
        from transformers import AutoConfig

        from roundhouse.pretrained import load_pretrained
        from roundhouse.training.memory_plan import refuse_unfit_layout

        refuse_unfit_layout(load_pretrained(AutoConfig, model), machine)
    return machine
