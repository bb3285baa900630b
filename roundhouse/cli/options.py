"""Shared options of commands, their output, and their exit codes.

Invariant: a kind of error has one exit code, that of a training step's process (`roundhouse.errors`), so one
`podFailurePolicy` reads flows and steps alike. `FINAL` are codes for which repeating cannot help; 1 is an error without
a kind, for which it may.

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
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from roundhouse.api.stores import DEFAULT_STORE, STORE_VARIABLE, named_store
from roundhouse.errors import EXIT_CODES, NOT_PERMITTED, BudgetReached, ConfigError, DataError, RoundhouseError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from roundhouse.config.models import RunConfig

DEFAULT_STATE = Path(".roundhouse")

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
    """Refuse a directory that does not exist."""
    return store if context.resilient_parsing else named_store(store)


_STORE_HELP = "The store: a path, file:// or s3:// URI."
StoreOption = Annotated[str, typer.Option("--store", envvar=STORE_VARIABLE, callback=_there, help=_STORE_HELP)]
NewStoreOption = Annotated[str, typer.Option("--store", envvar=STORE_VARIABLE, help=_STORE_HELP)]
"""Option of a command that may create the store, needs none, or only looks for the local services next to it."""
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for a program.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]
TrustStore = Annotated[
    bool,
    typer.Option("--trust-store", help="Accept the code, files, servers and secrets that the store's run.json names."),
]


def store_name(value: str | None) -> str | None:
    """Refuse an option's value that cannot be a name in the store, before anything starts."""
    from roundhouse.store.location import is_name

    if value is not None and not is_name(value):
        raise typer.BadParameter(
            f"{value[:200]!r} is not a name for the store: use letters, digits, dots, dashes and underscores, with a letter or "
            "digit first; at most 200."
        )
    return value


def store_option(store: str) -> str:
    """Return the option by which a printed command finds a store."""
    return "" if store == DEFAULT_STORE else f" --store {store}"


def load(path: Path, overrides: list[str] | None) -> RunConfig:
    from roundhouse.config.loading import load_config

    return load_config(path, overrides or [])


def accept_code(config: RunConfig, overrides: list[str] | None, trust_store: bool, place: str = "") -> None:
    """Ask a person at the terminal about the code, files, servers and secrets that only the store names, and record a
    yes.

    Args:
        place: key of the only section that the command uses.

    Raises:
        ConfigError: the answer is no, or stdin is not a terminal; an engine argument loads code.
    """
    from roundhouse.infra.consents import record_consent, refuse_unaccepted_code, unaccepted_code

    named = overrides or []
    if (keys := unaccepted_code(config, named, place)) and not trust_store:
        lines = "\n".join(f"  {key}: {value}" for key, value in keys.items())
        question = (
            f"The store's configuration of run {config.run_id!r} names code, files, servers or secrets of this machine:\n"
            f"{lines}\nUse them?"
        )
        if not (sys.stdin.isatty() and typer.confirm(question, err=True)):
            refuse_unaccepted_code(config, named, place)
    record_consent(config, place)


def state_of(store: str, state: Path | None) -> Path:
    """Return the directory of local state: the named one, else the directory of the store and its services."""
    from roundhouse.store.location import Location

    if state is not None:
        return state
    place = Location(store)
    beside = place.local_path.parent if place.is_local else DEFAULT_STATE
    return beside if (beside / "services").is_dir() else DEFAULT_STATE


@contextlib.contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """Open the path of an option for writing.

    Raises:
        ConfigError: it cannot be written; errors of a full disk are unchanged.
    """
    from roundhouse.errors import ConfigError

    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"{option} {path}: {error.filename} cannot be written ({error.strerror}).") from error


def console() -> Console:
    from roundhouse.cli.terminal import terminal_console

    return terminal_console()


def error_console() -> Console:
    from roundhouse.cli.terminal import terminal_console

    return terminal_console(stderr=True)


def out(text: str) -> None:
    """Write a text and a newline to stdout; to a terminal, with visible control characters."""
    text = text.rstrip("\n") + "\n"
    if sys.stdout.isatty():
        from roundhouse.cli.terminal import visible_controls

        text = visible_controls(text)
    sys.stdout.write(text)


def out_json(value: Any) -> None:
    """For `--json`."""
    out(json.dumps(value, indent=1))


def figure(value: float | None, *, signed: bool = False) -> str:
    """Format a number for tables; a dash for None."""
    return "–" if value is None else f"{value:+.4g}" if signed else f"{value:.4g}"


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], right: Collection[str] = (), title: str | None = None
) -> None:
    """Print a table; the columns of `right` are aligned to the right. Brackets in a name are not markup, and control
    characters are visible.

    A name, a number or a date is never broken: only texts of more than `PROSE` characters wrap, between words. A table
    that still does not fit the terminal is printed row by row, a line for each column. A pipe gets whole lines.
    """
    from rich.table import Table
    from rich.text import Text

    from roundhouse.cli.terminal import visible_controls

    terminal = console()
    cells = [[cell if isinstance(cell, Text) else Text(visible_controls(str(cell))) for cell in row] for row in rows]
    heads = [visible_controls(name) for name in columns]
    least = [_least_width(head, [row[place] for row in cells]) for place, head in enumerate(heads)]
    if terminal.is_terminal and sum(least) + (len(columns) - 1) * PADDING > terminal.width:
        return _print_records(terminal, heads, cells, title)
    table = Table(box=None, title=title, title_justify="left", padding=(0, PADDING, 0, 0), pad_edge=False)
    for place, (name, head) in enumerate(zip(columns, heads, strict=True)):
        wraps = any(row[place].cell_len > PROSE for row in cells)
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(Text(head), justify=justify, min_width=least[place], no_wrap=not wraps, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return terminal.print(table)


PROSE = 24
"""Longest cell that is kept in one line."""
PADDING = 2
"""Columns of a terminal between two columns of a table."""


def _least_width(head: str, cells: Sequence[Text]) -> int:
    """Return the width of a column in which nothing but long texts is wrapped, and no word is broken."""
    words = [len(head)]
    for cell in cells:
        words += [cell.cell_len] if cell.cell_len <= PROSE else [len(word) for word in cell.plain.split()]
    return max(words, default=0)


def _print_records(terminal: Console, heads: Sequence[str], rows: Sequence[Sequence[Text]], title: str | None) -> None:
    from rich.text import Text

    if title:
        terminal.print(Text(title.strip(), style="italic"))
    widest = max(map(len, heads))
    for row in rows:
        for head, cell in zip(heads, row, strict=True):
            terminal.print(Text(f"{head:<{widest}}  ", style="dim") + cell, soft_wrap=True)
        terminal.print()


USAGE = 2
"""The code that typer uses."""
FINAL = sorted([USAGE, NOT_PERMITTED, EXIT_CODES[DataError], EXIT_CODES[ConfigError]])


def exit_code(error: RoundhouseError) -> int:
    """The exit code of an error that ends the command.

    >>> exit_code(ConfigError("no such key"))
    78
    """
    if isinstance(error, BudgetReached):
        return NOT_PERMITTED
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
