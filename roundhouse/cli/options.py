"""The options that several commands share, how a command writes, and its exit codes.

Invariant: a kind of error has one number, that of a training step's process (`roundhouse.errors`), so that one
`podFailurePolicy` reads flows and steps alike. `FINAL` are those for which repeating cannot help; 1 is everything that has no
kind, and repeating it may.

    0 done   1 an error without a kind, a finding   2 a wrong command line   65 data   74 store   75 machines, networks
    77 a used up budget   78 configuration   130 Ctrl-C
"""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.errors import EXIT_CODES, ConfigError, DataError, RoundhouseError

if TYPE_CHECKING:
    from rich.console import Console

    from roundhouse.config.models import RunConfig

DEFAULT_STATE = Path(".roundhouse")
DEFAULT_STORE = ".roundhouse/store"
STORE_VARIABLE = "ROUNDHOUSE_STORE"

ConfigPath = Annotated[Path, typer.Argument(help="Run configuration (YAML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: --set train.optimizer.learning_rate=1e-4")
]
StateOption = Annotated[
    Path, typer.Option("--state", help="Directory of local state (infra.state of a configuration).")
]
StateOfStoreOption = Annotated[
    Path | None,
    typer.Option("--state", help="Directory of local state; left out: that of the store, else .roundhouse."),
]


def _there(context: typer.Context, store: str) -> str:
    """Refuse a directory that is not there: it would look like an empty store. A bucket is not asked."""
    from roundhouse.errors import StoreError
    from roundhouse.store.location import Location

    if not context.resilient_parsing and (place := Location(store)).is_local and not place.local_path.is_dir():
        raise StoreError(
            f"No store at {place.local_path}. Name one with --store or {STORE_VARIABLE}; without either it is "
            f"{DEFAULT_STORE} in the working directory, where `roundhouse train` makes it."
        )
    return store


_STORE_HELP = "The store: a path, file:// or s3:// URI."
StoreOption = Annotated[str, typer.Option("--store", envvar=STORE_VARIABLE, callback=_there, help=_STORE_HELP)]
NewStoreOption = Annotated[str, typer.Option("--store", envvar=STORE_VARIABLE, help=_STORE_HELP)]
"""Of a command that may make it, that needs none, or that only looks for the local services next to it."""
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for a program.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]
TrustStore = Annotated[
    bool, typer.Option("--trust-store", help="Execute the code, and send the secrets, that the store's run.json names.")
]


def load(path: Path, overrides: list[str] | None) -> RunConfig:
    from roundhouse.config.loading import load_config

    return load_config(path, overrides or [])


def accept_code(config: RunConfig, overrides: list[str] | None, trust_store: bool) -> None:
    """Have a person at the terminal accept the code and the endpoints of secrets that only the store names; refuse them without
    a terminal."""
    from roundhouse.config.loading import refuse_unnamed_code, unnamed_code

    named = overrides or []
    if trust_store or not (found := unnamed_code(config, named)):
        return
    said = "\n".join(f"  {key}: {value}" for key, value in found.items())
    asked = f"The store's configuration of run {config.run_id!r} names code, or secrets and their endpoints:\n{said}\nUse them?"
    if not (sys.stdin.isatty() and typer.confirm(asked, err=True)):
        refuse_unnamed_code(config, named)


def state_of(store: str, state: Path | None) -> Path:
    """The directory of local state: the one that was named, else the one that holds the store and its services."""
    from roundhouse.store.location import Location

    if state is not None:
        return state
    place = Location(store)
    beside = place.local_path.parent if place.is_local else DEFAULT_STATE
    return beside if (beside / "services").is_dir() else DEFAULT_STATE


@contextlib.contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """A block that writes to the path of an option.

    Raises:
        ConfigError: it cannot be written; what a full disk raises is left as it is.
    """
    from roundhouse.errors import ConfigError

    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"{option} {path}: {error.filename} cannot be written ({error.strerror}).") from error


def console() -> Console:
    from rich.console import Console

    return Console()


def error_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def out(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


def out_json(value: Any) -> None:
    """For `--json`."""
    out(json.dumps(value, indent=1))


def figure(value: float | None, *, signed: bool = False) -> str:
    """A number as tables show it; a dash where there is none."""
    return "–" if value is None else f"{value:+.4g}" if signed else f"{value:.4g}"


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], right: Collection[str] = (), title: str | None = None
) -> None:
    """A table on the terminal; the columns of `right` are aligned to the right. Cells are shown as they are and whole: brackets
    in a name are no markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title=title, title_justify="left")
    for name in columns:
        table.add_column(Text(name), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console().print(table)


USAGE = 2
"""As typer has it."""
NOT_PERMITTED = 77
"""A person has to allow more (EX_NOPERM)."""
FINAL = sorted([USAGE, NOT_PERMITTED, EXIT_CODES[DataError], EXIT_CODES[ConfigError]])


def exit_code(error: RoundhouseError) -> int:
    """The exit code of an error that ends the command.

    >>> exit_code(ConfigError("no such key"))
    78
    """
    from roundhouse.stages.cost import BudgetReached

    if isinstance(error, BudgetReached):
        return NOT_PERMITTED
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
