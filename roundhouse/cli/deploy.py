"""`roundhouse deploy`: the flows on a Prefect work pool of a cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from roundhouse.cli.options import DEFAULT_STATE, JsonOption, StateOption, out
from roundhouse.cli.prefect import at_prefect

app = typer.Typer()

TEMPLATE = Path("k8s/components/work-pool/base-job-template.yaml")
PRESETS = Path("k8s/components/work-pool/presets")


@app.command("deploy")
def deploy_command(
    file: Annotated[Path, typer.Argument(help="Deployments, in Prefect's format.")] = Path("prefect.yaml"),
    template: Annotated[Path, typer.Option(help="The work pool's base job template.")] = TEMPLATE,
    presets: Annotated[
        Path, typer.Option(help="Presets that the form of `train` offers; those in the pods.")
    ] = PRESETS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be made or changed.")] = False,
    as_json: JsonOption = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Register the flows on the Kubernetes work pool: the pool, its job template, deployments, schedules."""
    from flows.forms import PRESETS_VARIABLE, preset_names
    from roundhouse.config.deployments import read_deployments, read_template
    from roundhouse.config.secrets import masked_text
    from roundhouse.errors import ConfigError

    os.environ[PRESETS_VARIABLE] = str(presets)
    if not preset_names():
        raise ConfigError(
            f"--presets {presets}: no run configurations are there, so that the form of `train` has no choice."
        )
    pool = read_template(template)
    wanted = read_deployments(file, pool)
    if "PREFECT_API_URL" not in os.environ:  # a server that is named counts, also while `roundhouse up` runs here
        at_prefect(state)
    import flows._prefect.tuning  # noqa: F401 - before all else of Prefect
    from flows.work_pool import deploy

    server = masked_text(os.environ["PREFECT_API_URL"])
    if not as_json:
        out(f"Prefect server: {server}")
    lines = []
    for line in deploy(wanted, pool, dry_run=dry_run):
        lines.append(line)
        if not as_json:
            out(line)
    if as_json:
        out(json.dumps({"server": server, "dry_run": dry_run, "done": lines}, indent=1))
    elif dry_run:
        out("nothing was changed (--dry-run)")
