"""`roundhouse alerts`: the automations that tell a person when a run needs one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import DEFAULT_STATE, JsonOption, StateOption, console, out
from roundhouse.cli.prefect import at_prefect

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(no_args_is_help=True, help="Be told when a run fails, stalls, collapses or has used its budget.")


@app.command("install")
def alerts_install(
    webhook: Annotated[
        str | None,
        typer.Option(
            help="URL that alerts are sent to as JSON, with a `text` as Slack wants it.",
            envvar="ROUNDHOUSE_ALERTS_WEBHOOK",
        ),
    ] = None,
    suspend: Annotated[
        list[str] | None,
        typer.Option(
            help="An alert on which the run is suspended too: reward_collapse, kl, mismatch. May be repeated."
        ),
    ] = None,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Create the automations on a Prefect server, or change what they do; what a person added to them stays."""
    at_prefect(state)
    from flows.alerts import install

    _show(install(webhook, suspend or []))


@app.command("list")
def alerts_list(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """The automations that there are, and what each does."""
    at_prefect(state)
    from flows.alerts import installed

    found = installed()
    if as_json:
        out(json.dumps([_facts(each) for each in found], indent=1))
    else:
        _show(found)


@app.command("remove")
def alerts_remove(state: StateOption = DEFAULT_STATE) -> None:
    """Delete the automations. To silence one for a time, switch it off in Prefect's page."""
    at_prefect(state)
    from flows.alerts import remove

    out(f"removed: {', '.join(remove()) or 'there was none'}")


def _show(automations: Sequence[Any]) -> None:
    from rich.table import Table

    table = Table("alert", "on", "does", box=None)
    for each in automations:
        facts = _facts(each)
        table.add_row(facts["name"], "yes" if facts["enabled"] else "no", ", ".join(facts["actions"]))
    console().print(table if automations else "No alerts are installed: roundhouse alerts install")


def _facts(automation: Any) -> dict[str, Any]:
    from flows.alerts import PREFIX

    shown = {
        "do-nothing": "shows it in Prefect's event feed",
        "call-webhook": "calls the webhook",
        "suspend-flow-run": "suspends the run",
    }
    actions = [shown.get(action.type, action.type) for action in automation.actions]
    return {"name": automation.name.removeprefix(PREFIX), "enabled": automation.enabled, "actions": actions}
