"""What a person decides about a run on the terminal: whether a version is promoted, and how much the run may use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from roundhouse.cli.options import DEFAULT_STORE, StateOfStoreOption, StoreOption, console, out, state_of
from roundhouse.cli.prefect import find_prefect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundhouse.store.run import Run


def runs_approve(
    run_id: str,
    version: Annotated[
        int | None, typer.Argument(help="Policy version; left out: list those that wait.", min=0)
    ] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Do not promote it.")] = False,
    comment: Annotated[str, typer.Option(help="Why; kept with the answer.")] = "",
    store: StoreOption = DEFAULT_STORE,
    state: StateOfStoreOption = None,
) -> None:
    """Approve the promotion of a version, or refuse it. The first answer counts."""
    from roundhouse.stages.approval import answer
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    if version is None:
        return _show_waiting(run)
    given = answer(run, version, not refuse, comment)
    if find_prefect(state_of(store, state)):
        from flows.approval import carry_out

        carry_out(run, version, given)
    else:
        from roundhouse.tracking.mlflow import tell_mlflow

        tell_mlflow(run, version)
    return out(f"{run_id}: version {version} was {given}")


def raise_limits(store: str, run_id: str, wanted: Sequence[str], comment: str) -> None:
    """Record `--budget name=value` in the store.

    Raises:
        ConfigError: not of that form, no such limit, or no raise.
    """
    import getpass

    from roundhouse.errors import ConfigError
    from roundhouse.stages.budget import raise_budget
    from roundhouse.store.run import load_run

    limits = {}
    for text in wanted:
        name, _, value = text.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--budget {text!r} is not of the form limit=number, such as gpu_hours=10.") from None
    raised = raise_budget(load_run(store, run_id), limits, comment, getpass.getuser())
    out(f"{run_id}: budget raised to {', '.join(f'{name}={value:g}' for name, value in raised.limits.items())}")


def _show_waiting(run: Run) -> None:
    from rich.table import Table
    from rich.text import Text

    from roundhouse.stages.approval import open_questions

    questions = open_questions(run)
    table = Table("version", "why", "until", "then", box=None)
    for question in questions:
        until = "" if question.until is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(question.until))
        then = "" if question.until is None else question.at_limit
        table.add_row(str(question.version), Text(question.why), until, then)
    console().print(table if questions else f"No version of {run.run_id} waits for approval.")
