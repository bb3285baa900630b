"""What a run may use, and what a person has allowed it since.

    <store>/runs/<run>/budget/0001.json     the first raise: which limits, to what, by whom, with what comment

Invariant: a raise is written once and never changed. The budget is the configuration's with all raises: of each limit the
largest value counts, so it is the same after any restart, on any machine, whichever way it was raised.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.stages.cost import BUDGETED, run_totals
from roundhouse.store.location import AlreadyExists, NotFound
from roundhouse.store.run import Run

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
