"""`roundhouse schedule`: collect rollouts every night, say, and fill in the nights that were missed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from roundhouse.cli.options import (
    DEFAULT_STATE,
    DEFAULT_STORE,
    JsonOption,
    StateOfStoreOption,
    StateOption,
    StoreOption,
    console,
    out,
    state_of,
)
from roundhouse.cli.prefect import at_prefect

if TYPE_CHECKING:
    from flows.schedules import Scheduled

app = typer.Typer(no_args_is_help=True, help="Collect rollouts on a schedule.")
NameArgument = Annotated[str, typer.Argument(help="The dataset's name.")]


@app.command("collect")
def schedule_collect(
    cron: Annotated[str, typer.Option(help="When: five fields, such as '0 2 * * *' for 02:00 every night.")],
    name: Annotated[str, typer.Option(help="Name of the dataset.")],
    run: Annotated[str, typer.Option(help="The run whose checkpoint plays.")],
    version: Annotated[int | None, typer.Option(help="Policy version; the newest when left out.", min=0)] = None,
    promoted: Annotated[
        bool, typer.Option("--promoted", help="With the checkpoint that is promoted at that moment.")
    ] = False,
    keep_last: Annotated[
        int | None, typer.Option(help="Versions of the dataset to keep; all when left out.", min=1)
    ] = None,
    keep_days: Annotated[float | None, typer.Option(help="Days for which a version is kept at least.")] = None,
    timezone: Annotated[str, typer.Option(help="In whose hours: UTC, Europe/Berlin, …")] = "UTC",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the run's configuration.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    state: StateOfStoreOption = None,
) -> None:
    """Collect rollouts of a run's checkpoint by a cron expression into datasets/<name>/<moment>."""
    from pydantic import ValidationError

    from flows.forms import CollectForm
    from roundhouse.config.patterns import in_words
    from roundhouse.errors import ConfigError
    from roundhouse.store.location import Location

    given = {
        "version": version,
        "checkpoint": "promoted" if promoted else "newest",
        "keep_last": keep_last,
        "keep_days": keep_days,
        "overrides": overrides or [],
    }
    try:
        form = CollectForm.model_validate({"run_id": run, "store": Location(store).uri, "name": name} | given)
    except ValidationError as error:
        first = error.errors()[0]
        named = f"--{first['loc'][0]} {first['input']!r}: " if first["loc"] else ""
        mismatch = first["type"] == "string_pattern_mismatch"
        raise ConfigError(
            f"{named}{'must be ' + in_words(first['ctx']['pattern']) if mismatch else first['msg']}"
        ) from None
    form.resolve()  # an unknown run or override is told now, not at two in the morning
    at_prefect(state_of(store, state))
    from flows.schedules import add_schedule

    made = add_schedule(form, cron, timezone)
    out(f"{name}: {cron} ({timezone}), next at {_moment(made.next_moment)}")


@app.command("list")
def schedule_list(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """All schedules."""
    at_prefect(state)
    from flows.schedules import schedules

    found = schedules()
    if as_json:
        out(json.dumps([_facts(each) for each in found], indent=1))
        return
    from rich.table import Table

    table = Table("dataset", "run", "version", "cron", "time zone", "next", "keeps", box=None)
    for each in found:
        facts = _facts(each)
        table.add_row(
            *(str(facts[name]) for name in ("name", "run", "version", "cron", "timezone", "next", "keep_last"))
        )
    console().print(table)


@app.command("remove")
def schedule_remove(name: NameArgument, state: StateOption = DEFAULT_STATE) -> None:
    """Stop collecting into a dataset; what was collected stays."""
    at_prefect(state)
    from flows.schedules import remove_schedule

    remove_schedule(name)
    out(f"{name}: no longer scheduled")


@app.command("backfill")
def schedule_backfill(
    name: NameArgument,
    since: Annotated[datetime, typer.Option(help="From this day (UTC) on.", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M"])],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the moments.")] = False,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Collect the moments of a schedule that were missed: the machine was off, or the collection failed."""
    at_prefect(state)
    from flows.schedules import back_fill, missed

    moments = missed(name, since.replace(tzinfo=UTC))
    for moment in moments:
        out(_moment(moment))
    if not dry_run:
        back_fill(name, moments)
    out(f"{name}: {len(moments)} {'missed' if dry_run else 'asked for'}")


def _facts(schedule: Scheduled) -> dict[str, object]:
    form = schedule.form
    return {
        "name": schedule.name,
        "run": form.run_id,
        "store": form.store,
        "version": form.checkpoint if form.version is None else form.version,
        "cron": schedule.cron,
        "timezone": schedule.timezone,
        "next": _moment(schedule.next_moment),
        "keep_last": "all" if form.keep_last is None else form.keep_last,
        "keep_days": form.keep_days,
        "active": schedule.active,
    }


def _moment(moment: datetime | None) -> str:
    return "never" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
