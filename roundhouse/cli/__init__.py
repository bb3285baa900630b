"""The `roundhouse` command. Each command imports its modules when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from roundhouse import __version__
from roundhouse.cli import (
    env_try,
    offline,
    plugins,
    prefect,
    project,
    reports,
    rollout_files,
    runs,
    services,
    store,
    training,
)
from roundhouse.cli.late import late_commands
from roundhouse.cli.options import error_console, exit_code, out
from roundhouse.errors import ConfigError, RoundhouseError

RENAMED_COMMANDS = (
    (runs.app, "runs", "why", "lineage"),
    (runs.app, "runs", "activity", "status"),
    (runs.app, "runs", "retry", "resume"),
    (offline.datasets_app, "datasets", "retain", "prune"),
)
"""Group, its name, a word of before and the one of today: the earlier word is refused with the new one."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
TERMINATED = 143
"""The same after SIGTERM."""


def _show_version(asked: bool) -> None:
    if asked:
        out(f"roundhouse {__version__}")
        raise typer.Exit


runs.app.add_typer(reports.app)
COMMANDS: tuple[tuple[typer.Typer, str | None], ...] = (
    (training.app, None),
    (project.app, None),
    (services.app, None),
    (prefect.app, None),
    (runs.app, "runs"),
    (offline.app, None),
    (offline.datasets_app, "datasets"),
    (env_try.app, "env"),
    (prefect.schedule_app, "schedule"),
    (prefect.alerts_app, "alerts"),
    (store.app, "store"),
    (rollout_files.app, None),
    (plugins.app, "plugins"),
    (store.commands, None),
)
"""Groups of commands with their names, in the order of `roundhouse --help`; a group without a name holds top-level commands."""
app = typer.Typer(
    cls=late_commands(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning as a durable workflow.",
)


def _refuse_renamed(group: typer.Typer, name: str, old: str, new: str) -> None:
    @group.command(old, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def refuse() -> None:
        raise ConfigError(f"`roundhouse {name} {old}` is now `roundhouse {name} {new}`.")


for _renamed in RENAMED_COMMANDS:
    _refuse_renamed(*_renamed)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def spread_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--set` before each override that follows another one.

    >>> spread_overrides(["train", "a.yaml", "--set", "x=1", "y=2", "--dry-run"])
    ['train', 'a.yaml', '--set', 'x=1', '--set', 'y=2', '--dry-run']
    """
    spread: list[str] = []
    for argument in arguments:
        follows = len(spread) > 1 and spread[-2] == "--set"
        if follows and "=" in argument and not argument.startswith("-"):
            spread.append("--set")
        spread.append(argument)
    return spread


def main() -> None:
    """Entry point: errors that a person can act on are shown without a traceback, and distinguished by their exit code."""
    from roundhouse.cli.terminal import show_controls_in_logs

    show_controls_in_logs()
    try:
        app(args=spread_overrides(sys.argv[1:]))
    except Exception as error:
        from roundhouse.health.policy import typed

        if not isinstance(known := typed(error), RoundhouseError):
            raise
        from rich.markup import escape

        error_console().print(f"[bold red]error:[/] {escape(str(known))}", highlight=False, soft_wrap=True)
        sys.exit(exit_code(known))
    except SystemExit as end:
        if end.code in (INTERRUPTED, TERMINATED):
            error_console().print("\nInterrupted. Run the same command again to resume.")
        raise
