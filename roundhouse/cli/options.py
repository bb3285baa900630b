"""The options that several commands share, and how a command writes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from roundhouse.config.models import RunConfig

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
TrustStore = Annotated[
    bool, typer.Option("--trust-store", help="Execute the classes, files and images that the store's run.json names.")
]

DEFAULT_STATE = Path(".roundhouse")
DEFAULT_STORE = ".roundhouse/store"


def load(path: Path, overrides: list[str] | None) -> RunConfig:
    from roundhouse.config.loading import load_config

    return load_config(path, overrides or [])


def accept_code(config: RunConfig, overrides: list[str] | None, trust_store: bool) -> None:
    """Have a person at the terminal accept the code that only the store names; refuse it where nobody can be asked."""
    from roundhouse.config.trust import refuse_unnamed_code, unnamed_code

    named = overrides or []
    if trust_store or not (found := unnamed_code(config, named)):
        return
    said = "\n".join(f"  {key}: {value}" for key, value in found.items())
    asked = f"The store's configuration of run {config.run_id!r} names code:\n{said}\nExecute it?"
    if not (sys.stdin.isatty() and typer.confirm(asked, err=True)):
        refuse_unnamed_code(config, named)


def console() -> Console:
    from rich.console import Console

    return Console()


def error_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def out(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
