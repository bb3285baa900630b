"""`roundhouse runs status`: what a run is doing now, and what went wrong."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out

if TYPE_CHECKING:
    from roundhouse.health.heartbeat import Beat

STATES = {
    "working": "[green]working[/]",
    "idle": "[green]idle[/], between stages",
    "ended": "ended",
    "silent": "[red]silent[/]: its process is gone, or hangs altogether; start the run again, it goes on where it stopped",
}
COLORS = {"healthy": "green", "warning": "yellow", "error": "red"}


def runs_status(
    run_id: str,
    store: StoreOption = DEFAULT_STORE,
    errors: Annotated[int, typer.Option(help="How many of the newest errors to show.", min=0)] = 5,
    as_json: JsonOption = False,
) -> None:
    """What a run's process is doing: work in flight with its age, health, the newest errors."""
    from roundhouse.errors import StoreError
    from roundhouse.health.heartbeat import read_beat
    from roundhouse.store.run import load_run

    run = load_run(store, run_id)
    beat = read_beat(run.location)
    if beat is None:
        raise StoreError(
            f"Run {run_id!r} has no heartbeat: no process has worked on it since it was created. Start it."
        )
    if as_json:
        out(json.dumps({"state": beat.state(time.time()), **beat.model_dump(mode="json")}, indent=1))
        return
    show(beat, errors)


def show(beat: Beat, errors: int) -> None:
    """The heartbeat on a terminal."""
    from rich.markup import escape

    now, terminal = time.time(), console()
    age = now - beat.written_at
    terminal.print(
        f"process {beat.pid} on {beat.host}: {STATES[beat.state(now)]} (heartbeat {age:.0f} s ago)", highlight=False
    )
    health = beat.health
    when = "health" if beat.state(now) in ("working", "idle") else "health at the last heartbeat"
    terminal.print(f"{when}: [{COLORS[health.status]}]{health.status}[/], {escape(health.message)}", highlight=False)
    for name, count in beat.counts.items():
        terminal.print(f"  {count:>5} {name}{_oldest(beat, name)}", highlight=False, markup=False)
    for error in beat.errors[-errors:] if errors else []:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error.timestamp))
        said = f"{stamp}  {error.severity}  {error.module_name} ({error.work_context}): {error.message}"
        terminal.print(said, highlight=False, markup=False)


def _oldest(beat: Beat, name: str) -> str:
    """The oldest work of a kind, where it is among those that are listed."""
    works = [work for work in beat.in_flight if f"{work.module}: {work.kind}" == name]
    if not works:
        return ""
    oldest = max(works, key=lambda work: work.seconds)
    what = " ".join(word for word in (oldest.about, oldest.where) if word)
    return f"  oldest {what or '–'}: {oldest.seconds:.0f} s, silent for {oldest.silent_seconds:.0f} s"
