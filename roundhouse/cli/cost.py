"""`roundhouse runs cost`: what a run used, what of it was wasted and why, and what is left of its budget."""

from __future__ import annotations

import json
from typing import Any

import typer

from roundhouse.cli.options import DEFAULT_STORE, JsonOption, StoreOption, console, out

app = typer.Typer()

WHY = {
    "failed": "the rollout has no reward",
    "quarantined": "validation refused the rollout",
    "omitted": "the group was too small, or more than was wanted",
    "untrained": "no weight, its group had one reward throughout",
}
"""What each reason means, as `roundhouse.stages.cost` counts it."""


@app.command("cost")
def runs_cost(run_id: str, store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """What a run used, what was wasted and why, and its budget."""
    from roundhouse.store.run import load_run

    found = run_cost(load_run(store, run_id))
    if as_json:
        out(json.dumps(found, indent=1))
        return
    from rich.markup import escape
    from rich.table import Table

    used = Table("used", "", "budget", box=None)
    for name, total in found["totals"].items():
        if total or name in found["budget"]:
            limit = found["budget"].get(name)
            hours = f" ({_duration(total)})" if name.endswith("_hours") else ""
            used.add_row(name.replace("_", " "), f"{total:,.4g}{hours}", "" if limit is None else f"{limit:,.10g}")
    console().print(used)
    if generated := found["totals"]["generated_tokens"]:
        wasted = Table("not learnt from", "tokens", "share", box=None)
        for reason, tokens in found["wasted_tokens"].items():
            wasted.add_row(f"{reason}: {WHY[reason]}", f"{tokens:,.0f}", f"{tokens / generated:.1%}")
        console().print(wasted)
    for line in found["over_budget"]:
        console().print(f"[yellow]{escape(line)}[/]: the run waits for it to be raised")


def _duration(hours: float) -> str:
    """0.00728 hours say little: 26 s."""
    seconds = hours * 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if hours < 2 else f"{hours:.0f} h"


def run_cost(run: Any) -> dict[str, Any]:
    """Totals over the reported iterations, wasted tokens by reason, the budget and what of it is used up."""
    from roundhouse.stages.budget import budget_of, over_budget
    from roundhouse.stages.cost import is_waste, run_totals

    latest = run.latest_checkpoint()
    version = run.first_version if latest is None else latest.policy_version
    totals = run_totals(run, version if run.is_reported(version) else max(version - 1, run.first_version))
    wasted = {name[len("waste/") : -len("_tokens")]: value for name, value in totals.items() if is_waste(name)}
    return {
        "run_id": run.run_id,
        "totals": {name: value for name, value in totals.items() if not is_waste(name)},
        "wasted_tokens": wasted,
        "currency": run.config.cost.prices.currency,
        "budget": budget_of(run),
        "over_budget": over_budget(budget_of(run), totals),
    }
