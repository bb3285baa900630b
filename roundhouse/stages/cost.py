"""What an iteration and a run cost, and what a run may use.

Invariant: costs come from what stages recorded of themselves; a GPU costs while it is held, used or not. Why tokens are wasted
stands in `trajectories.ledger`.

Budget:

    <store>/runs/<run>/budget/0001.json     the first raise: which limits, to what, by whom, with what comment

A raise is written once and never changed. The budget is the configuration's with all raises: of each limit the largest value
counts, so it is the same after any restart, on any machine, whichever way it was raised.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from roundhouse.config.models import RunConfig
from roundhouse.config.training import ProcessService
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.store.location import AlreadyExists, NotFound
from roundhouse.store.manifest import Manifest, current_names
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest

HOUR = 3600.0
BUDGETED = ("wall_hours", "gpu_hours", "cpu_hours", "generated_tokens", "money")
"""Names of `Budget`."""
_TOTAL_OF = {
    "time/iteration": ("wall_hours", HOUR),
    "cost/gpu_seconds": ("gpu_hours", HOUR),
    "cost/cpu_seconds": ("cpu_hours", HOUR),
    "cost/generated_tokens": ("generated_tokens", 1.0),
    "cost/total": ("money", 1.0),
}
"""Which total a metric adds to, and its unit in the metric's."""


def iteration_cost(config: RunConfig, manifests: Mapping[str, Manifest], seconds: float) -> dict[str, float]:
    """The cost metrics of an iteration, for its report; those of validate and train stand in their own manifests.

    Args:
        manifests: of its complete stages.
        seconds: wall time of the whole iteration.
    """
    stages = [manifest for kind, manifest in manifests.items() if kind != StageKind.REPORT]
    engine = config.generation.replicas * config.generation.gpus_per_replica
    train = manifests.get(StageKind.TRAIN)
    in_stage = 0.0 if train is None else train.finished_at - train.started_at
    held = in_stage if isinstance(config.train.service, ProcessService) else seconds
    gpu_seconds = engine * seconds + config.cost.trainer_gpus * held
    cpu_seconds = sum(manifest.resources.get("cpu_seconds", 0.0) for manifest in stages)
    prices = config.cost.prices
    metrics = {
        "cost/gpu_seconds": gpu_seconds,
        "cost/cpu_seconds": cpu_seconds,
        "cost/bytes_written": float(sum(entry.size for manifest in stages for entry in manifest.files)),
        "cost/stage_attempts": float(sum(manifest.attempt for manifest in stages)),
    }
    if prices.gpu_hour or prices.cpu_hour:
        metrics["cost/total"] = (gpu_seconds * prices.gpu_hour + cpu_seconds * prices.cpu_hour) / HOUR
    found = {name: value for manifest in stages for name, value in manifest.metrics.items()}
    if generated := found.get("cost/generated_tokens"):
        wasted = sum(value for name, value in found.items() if is_waste(name))
        metrics["waste/token_fraction"] = wasted / generated
    return metrics


def totals_after(before: Mapping[str, float], *metrics: Mapping[str, float]) -> dict[str, float]:
    """Totals of a run with one more iteration: by the names of `Budget`, and wasted tokens by reason.

    Args:
        before: totals of the iterations before; empty for the first.
        metrics: of the iteration's stages, the report's among them.
    """
    totals = dict.fromkeys(BUDGETED, 0.0) | dict(before)
    for found in metrics:
        for name, value in found.items():
            total, unit = _TOTAL_OF.get(name, (name, 1.0))
            if name in _TOTAL_OF or is_waste(name):
                totals[total] = totals.get(total, 0.0) + value / unit
    return totals


def run_totals(run: Run, iteration: int) -> dict[str, float]:
    """Totals of all iterations up to a reported one; all 0 before the first."""
    reference = run.stage(iteration, StageKind.REPORT).reference()
    recorded = {} if reference is None else read_manifest(reference).details.get("totals", {})
    return totals_after(current_names(recorded))


def is_waste(name: str) -> bool:
    """Whether a metric or a total counts tokens wasted for one reason."""
    return name.startswith("waste/") and name.endswith("_tokens")


PLACE = "budget"


class BudgetReached(RoundhouseError):
    """The run has used what it may; nothing failed."""


class Raise(BaseModel):
    """A person's word on the budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: dict[str, float]
    """New values, by the names of `cost.budget`."""
    comment: str = ""
    by: str = ""
    at: float
    """Seconds since the epoch."""


def raises(run: Run) -> list[Raise]:
    """All raises, oldest first."""
    place, found = run.location / PLACE, list[Raise]()
    while True:  # by number, since a bucket may list late
        try:
            found.append(Raise.model_validate_json(place.read(f"{len(found) + 1:04d}.json")))
        except NotFound:
            return found


def budget_of(run: Run) -> dict[str, float]:
    """The limits that count now, by name; those that nobody set are not there."""
    limits: dict[str, float] = run.config.cost.budget.model_dump(exclude_none=True)
    for raised in raises(run) if limits else []:
        limits = {name: max(limit, raised.limits.get(name, limit)) for name, limit in limits.items()}
    return limits


def raise_budget(run: Run, limits: Mapping[str, float], comment: str = "", by: str = "") -> Raise:
    """Allow the run more. A limit that the configuration at hand does not set may be set where the run is at work.

    Raises:
        ConfigError: no limit of a budget, or a value that does not raise it.
    """
    present = budget_of(run)
    for name, value in limits.items():
        if name not in BUDGETED:
            raise ConfigError(f"budget {name} is no limit; those are {', '.join(BUDGETED)}.")
        if not value > present.get(name, 0.0):
            raise ConfigError(
                f"budget {name}={value:g} does not raise the limit of {present.get(name, 0.0):g}. Give more."
            )
    raised = Raise(limits=dict(limits), comment=comment, by=by, at=time.time())
    place, number = run.location / PLACE, len(raises(run)) + 1
    while True:
        try:
            place.create(f"{number:04d}.json", (raised.model_dump_json(indent=1) + "\n").encode())
            return raised
        except AlreadyExists:
            number += 1


def over_budget(limits: Mapping[str, float], totals: Mapping[str, float]) -> list[str]:
    """What of the budget is used up, one line each with the key to raise, and by how much it is exceeded."""
    lines = []
    for name, limit in limits.items():
        if (used := totals[name]) >= limit:
            beyond = f", {used - limit:.4g} too much" if used > limit else ""
            lines.append(f"{used:.6g} of cost.budget.{name}={limit:g} are used{beyond}")
    return lines


def used_up(run: Run, iteration: int) -> list[str]:
    """What keeps iteration `iteration` from beginning, one line each; none where the budget lasts."""
    if not run.config.cost.budget.model_dump(exclude_none=True):
        return []
    return over_budget(budget_of(run), run_totals(run, iteration - 1))


def budget_reached(run: Run, iteration: int, lines: list[str]) -> BudgetReached:
    """The error that ends a run which waits for a person."""
    return BudgetReached(
        f"Run {run.run_id} rests before iteration {iteration}: {'; '.join(lines)}. Raise it, and it goes on: "
        f"`roundhouse runs resume {run.run_id} --budget <limit>=<more>`."
    )
