"""`roundhouse runs status | cost | lineage | compare`: reports about a run from its store."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, figure, out, out_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundhouse.health.heartbeat import Beat
    from roundhouse.sql.lineage import TrainedOn

app = typer.Typer()

STATES = {
    "working": "[green]working[/]",
    "idle": "[green]idle[/], between stages",
    "ended": "ended",
    "silent": "[red]silent[/]: its process has ended or hangs. Start the run again to resume",
}
COLORS = {"healthy": "green", "warning": "yellow", "error": "red"}


@app.command("status")
def runs_status(
    run_id: str,
    store: StoreOption = DEFAULT_STORE,
    errors: Annotated[int, typer.Option(help="How many of the newest errors to show.", min=0)] = 5,
    as_json: JsonOption = False,
) -> None:
    """Show the activity of a run's process: work in flight with its age, health, the newest errors."""
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
        return out_json({"state": beat.state(time.time()), **beat.model_dump(mode="json")})
    return show(beat, errors)


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
        line = f"  {count:>5} {name}"
        if works := [work for work in beat.in_flight if f"{work.module}: {work.kind}" == name]:  # not all are listed
            oldest = max(works, key=lambda work: work.seconds)
            what = " ".join(word for word in (oldest.about, oldest.where) if word)
            line += f"  oldest {what or '–'}: {oldest.seconds:.0f} s, silent for {oldest.silent_seconds:.0f} s"
        terminal.print(line, highlight=False, markup=False)
    if beat.state(now) == "silent" and (note := beat.end_without_report()) is not None:
        terminal.print(f"If it is gone: {note}", highlight=False, markup=False)
    for error in beat.errors[-errors:] if errors else []:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(error.timestamp))
        text = f"{stamp}  {error.severity}  {error.module_name} ({error.work_context}): {error.message}"
        terminal.print(text, highlight=False, markup=False)


WHY = {
    "trained": "a step gave them weight",
    "failed": "the rollout has no reward",
    "quarantined": "validation refused the rollout",
    "omitted": "the group was too small, or more than was wanted",
    "untrained": "no weight, its group had one reward throughout",
    "masked": "the loss skips their turn",
    "skipped": "the iteration was skipped",
    "pending": "collected, and not trained on yet; of CPU: in use",
    "evaluated": "held-out tasks",
    "datasets": "collected for datasets",
    "branched": "new turns of branches",
    "replayed": "stages run again",
    "judged": "answers of a rubric's judge, and stored rollouts judged again",
    "repeated": "calls on record that had to be made again",
    "interrupted": "attempts and programs killed, to their last sign of life",
    "driver": "the flow itself, checks of the engine, failed attempts",
}
"""Meaning of each cause of `roundhouse.stages.cost.bill_of`."""


@app.command("cost")
def runs_cost(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="A run; left out: all of the store.")] = None,
    by: Annotated[str | None, typer.Option(metavar="LABEL", help="Sum the runs by a label (tracking.labels).")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the cost of a run: each token and CPU second by its one cause, and its budget. Without a run, the bill of
    all of them."""
    from roundhouse.errors import ConfigError
    from roundhouse.store.run import load_run, readable_runs

    if run_id is None:
        return _show_bills([(run, run_cost(run)) for run in readable_runs(store)], by, as_json)
    if by is not None:
        raise ConfigError(f"--by {by} sums over runs, but {run_id} is one. Leave one of the two out.")
    bill = run_cost(load_run(store, run_id))
    if as_json:
        return out_json(bill)
    from rich.markup import escape

    used = []
    for name, total in bill["totals"].items():
        if total or name in bill["budget"]:
            limit = bill["budget"].get(name)
            hours = f" ({_duration(total)})" if name.endswith("_hours") else ""
            used.append((name.replace("_", " "), f"{total:,.4g}{hours}", "" if limit is None else f"{limit:,.10g}"))
    print_table(("counted by cost.budget", "", "limit"), used)
    seconds = sum(bill["bill"]["cpu_seconds"].values())
    out(
        "It counts reported iterations, and CPU time in their stages. Below is the whole run with its start and its driver: "
        f"{bill['wall_seconds']:,.0f} s, {seconds:,.1f} CPU s."
    )
    print_bill(bill["bill"], bill["currency"])
    for line in bill["over_budget"]:
        console().print(f"[yellow]{escape(line)}[/]: the run waits for it to be raised")
    return None


def print_bill(bill: dict[str, dict[str, float]], currency: str) -> None:
    """Print a row per cause: tokens with their share, CPU seconds, money if a price is set."""
    priced, rows = [currency] if bill["money"] else [], []
    whole = sum(bill["tokens"].values()) or 1.0
    for cause in [cause for cause in WHY if cause in bill["tokens"] or cause in bill["cpu_seconds"]]:
        tokens, seconds = bill["tokens"].get(cause, 0.0), bill["cpu_seconds"].get(cause, 0.0)
        money = [f"{bill['money'].get(cause, 0.0):,.4g}"] if priced else []
        rows.append((f"{cause}: {WHY[cause]}", f"{tokens:,.0f}", f"{tokens / whole:.1%}", f"{seconds:,.1f}", *money))
    sums = [math.fsum(bill[part].values()) for part in ("tokens", "cpu_seconds", "money")]
    rows.append(("all", f"{sums[0]:,.0f}", "", f"{sums[1]:,.1f}", *([f"{sums[2]:,.4g}"] if priced else [])))
    print_table(("cause", "tokens", "share", "CPU s", *priced), rows)
    for model, tokens in bill["unpriced_judge_tokens"].items():
        out(f"{model}: {tokens:,.0f} tokens without a price (cost.prices.judges); no money is counted for them")


def _show_bills(bills: Sequence[tuple[Any, dict[str, Any]]], by: str | None, as_json: bool) -> None:
    """The bills of runs, one by one or summed by a label, and the sum of all."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run, run_bill in bills:
        name = run.run_id if by is None else run.config.tracking.labels.get(by, f"without {by}")
        groups.setdefault(name, []).append(run_bill)
    sums = {name: _sum_of_bills(group) for name, group in groups.items()}
    total = _sum_of_bills([run_bill for _, run_bill in bills])
    if as_json:
        return out_json({"runs" if by is None else by: sums, "total": total})
    currencies = {run_bill["currency"] for _, run_bill in bills}
    for name, bill in sums.items():
        tokens, seconds, money = (sum(bill[part].values()) for part in ("tokens", "cpu_seconds", "money"))
        priced = f", {money:,.4g} {groups[name][0]['currency']}" if bill["money"] else ""
        runs = "" if by is None else f" ({len(groups[name])} runs)"
        out(f"{name}: {tokens:,.0f} tokens, {seconds:,.1f} CPU s{priced}{runs}")
    return print_bill(total, next(iter(currencies), ""))


def _sum_of_bills(costs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Add up causes; without money if it is in several currencies."""
    total: dict[str, dict[str, float]] = {"tokens": {}, "cpu_seconds": {}, "money": {}, "unpriced_judge_tokens": {}}
    for bill in costs:
        for part, causes in bill["bill"].items():
            for cause, value in causes.items():
                total[part][cause] = total[part].get(cause, 0.0) + value
    return total if len({bill["currency"] for bill in costs}) <= 1 else total | {"money": {}}


def _duration(hours: float) -> str:
    """Format hours in a readable unit: 0.00728 hours are 26 s."""
    seconds = hours * 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if hours < 2 else f"{hours:.0f} h"


def run_cost(run: Any) -> dict[str, Any]:
    """Totals over the reported iterations, wasted tokens by reason, the bill, the budget and what of it is used up."""
    from roundhouse.stages.cost import bill_of, budget_of, is_waste, over_budget, run_totals
    from roundhouse.stages.report import wall_seconds

    latest = run.latest_checkpoint()
    version = run.first_version if latest is None else latest.policy_version
    totals = run_totals(run, version if run.is_reported(version) else max(version - 1, run.first_version))
    wasted = {name[len("waste/") : -len("_tokens")]: value for name, value in totals.items() if is_waste(name)}
    return {
        "run_id": run.run_id,
        "wall_seconds": wall_seconds(run),
        "totals": {name: value for name, value in totals.items() if not is_waste(name)},
        "wasted_tokens": wasted,
        "bill": bill_of(run),
        "currency": run.config.cost.prices.currency,
        "budget": budget_of(run),
        "over_budget": over_budget(budget_of(run), totals),
    }


ITERATIONS_SHOWN, SPARK_WIDTH = 16, 32
_BLOCKS = "▁▂▃▄▅▆▇█"


@app.command("lineage")
def lineage(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="A run.")] = None,
    version: Annotated[int | None, typer.Argument(metavar="VERSION", help="Policy version of the run.", min=0)] = None,
    row: Annotated[str | None, typer.Option("--row", help="A task_id: which checkpoints it went into.")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
    limit: Annotated[int, typer.Option(help="Rows shown on a terminal; JSON has all.", min=1)] = 20,
) -> None:
    """Show the training data of a checkpoint: rows, prompts, policy versions, seeds, code. Or the checkpoints trained
    on a row."""
    if row is not None:
        if version is not None:
            raise typer.BadParameter("--row asks about all versions: leave VERSION out.")
        return _show_row(store, row, run_id, as_json)
    if run_id is None or version is None:
        raise typer.BadParameter(
            "Name a run and a version (roundhouse runs lineage quickstart 12), or a row with --row."
        )
    from roundhouse.sql.lineage import trained_on

    trained = trained_on(store, run_id, version)
    return out_json(trained.as_json()) if as_json else _show_trained_on(trained, limit)


@app.command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    metrics: Annotated[list[str] | None, typer.Option("--metric", help="A metric to compare; may be repeated.")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Two runs side by side: what their configurations do not share, and their curves."""
    from rich.text import Text

    from roundhouse.sql.lineage import compare_runs

    comparison = compare_runs(store, a, b, metrics)
    if as_json:
        return out_json(comparison.as_json())
    differences: list[Sequence[object]] = [
        (key, *(json.dumps(value) for value in values)) for key, values in comparison.differences.items()
    ]
    if comparison.code_versions[0] != comparison.code_versions[1]:
        differences.append((Text("code", style="dim"), *comparison.code_versions))
    if differences:
        print_table(("key", comparison.a, comparison.b), differences, title="configuration")
    else:
        out("The configurations are the same but for the run's name.")
    rows = []
    for name, by_iteration in comparison.curves.items():
        sides = [[pair[side] for pair in by_iteration.values()] for side in (0, 1)]
        points = [value for side in sides for value in side if value is not None]
        lasts = [next((value for value in reversed(side) if value is not None), None) for side in sides]
        sparks = [spark(side, min(points), max(points)) for side in sides]
        first, second = lasts
        difference = None if first is None or second is None else second - first
        curves = (Text(sparks[0], style="yellow"), figure(first), Text(sparks[1], style="cyan"), figure(second))
        rows.append((name, *curves, figure(difference, signed=True)))
    columns = ("metric", comparison.a, "last", comparison.b, "last", "b − a")
    return print_table(columns, rows, right=("last", "b − a"), title="\ncurves")


def _show_trained_on(found: TrainedOn, limit: int) -> None:
    from rich.text import Text

    terminal = console()
    place = found.checkpoint or "deleted by retention; its inputs are still here"
    terminal.print(Text(f"{found.run_id}, version {found.version}", style="bold"), Text(place, style="dim"))
    if found.version == 0:
        return terminal.print("The starting policy; no iteration made it.")
    for segment in found.segments:
        if segment.note:
            terminal.print(Text(segment.note, style="yellow"))
    iterations = found.iterations
    origins = {_origin(entry) for entry in iterations}
    several = len(origins) > 1  # rare; otherwise it is printed once, below
    columns = ("run", "iteration", "rows", "rollouts", "tokens", "reward", "sampled by", "made with")[: 7 + several]
    sample = _thinned(iterations, ITERATIONS_SHOWN)
    rows = (
        (
            entry["run_id"],
            entry["iteration"],
            entry["rows"],
            entry["rollouts"],
            f"{entry['trained_tokens']:,}",
            figure(entry["reward"]),
            f"version {', '.join(map(str, entry['policy_versions']))}"
            + (f" ({entry['dataset']})" if entry["dataset"] else ""),
            *([_origin(entry)] if several else []),
        )
        for entry in sample
    )
    print_table(columns, rows, right=columns[1:6])
    if len(origins) == 1:
        terminal.print(f"[dim]made with {origins.pop()}[/]", highlight=False)
    if len(sample) < len(iterations):
        terminal.print(f"[dim]{len(sample)} of {len(iterations)} iterations; all of them: --json[/]", highlight=False)
    _show_rows(found.rows, limit)
    return None


def _show_rows(found: list[dict[str, Any]], limit: int) -> None:
    from rich.text import Text

    rows = (
        (
            entry["row"],
            ", ".join(map(str, entry["iterations"])),
            entry["rollouts"],
            figure(entry["reward"]),
            Text(" ".join((entry["prompt"] or "–").split())[:120], no_wrap=True, overflow="ellipsis"),
        )
        for entry in found[:limit]
    )
    print_table(("row", "iterations", "rollouts", "reward", "prompt"), rows, right=("rollouts", "reward"))
    if len(found) > limit:
        console().print(f"[dim]{limit} of {len(found)} rows; more of them: --limit, --json[/]", highlight=False)


def _origin(entry: dict[str, Any]) -> str:
    """Seed, configuration and code of an iteration."""
    configs = ", ".join(digest[:8] for digest in entry["config_digests"])
    return f"seed {entry['seed']}, configuration {configs}, code {', '.join(entry['code_versions'])}"


def _show_row(store: str, row: str, run_id: str | None, as_json: bool) -> None:
    from rich.text import Text

    from roundhouse.sql.lineage import row_history

    history = row_history(store, row, None if run_id is None else [run_id])
    if as_json:
        return out_json({"row": row, "collected": history})
    rows = []
    for entry in history:
        if entry["first_version"] is None:
            went_into = f"no version: {', '.join(entry['refused'])}" if entry["refused"] else "no version"
        else:
            first, newest = entry["first_version"], entry["newest_version"]
            went_into = f"version {first}" if first == newest else f"versions {first} to {newest}"
            went_into += f", and {', '.join(entry['forks'])}" if entry["forks"] else ""
        rows.append(
            (
                entry["run_id"] + (f" ({entry['dataset']})" if entry["dataset"] else ""),
                entry["iteration"],
                entry["rollouts"],
                entry["trained"],
                f"{entry['trained_tokens'] or 0:,}",
                figure(entry["reward"]),
                went_into,
            )
        )
    console().print(Text(row, style="bold"))
    columns = ("run", "iteration", "rollouts", "trained on", "tokens", "reward", "went into")
    return print_table(columns, rows, right=columns[1:6])


def spark(values: list[float | None], low: float, high: float) -> str:
    """A curve as blocks; both runs of a line share its scale."""
    marks = []
    for value in _thinned(values, SPARK_WIDTH):
        level = 0.0 if value is None or high <= low else (value - low) / (high - low)
        marks.append(" " if value is None else _BLOCKS[round(level * (len(_BLOCKS) - 1))])
    return "".join(marks)


def _thinned(values: list[Any], count: int) -> list[Any]:
    """At most so many, evenly chosen, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]
