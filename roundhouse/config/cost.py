"""What a run's resources cost, and how much it may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roundhouse.config.section import PositiveFloat, Section


class PriceTable(Section):
    """Money for an hour of a resource, in one currency."""

    currency: str = "USD"
    gpu_hour: Annotated[float, Field(ge=0)] = 0
    cpu_hour: Annotated[float, Field(ge=0)] = 0
    """Of CPU time used, not of cores held."""


class Budget(Section):
    """Limits of a whole run. One that is reached holds it before the next iteration; raised, it goes on."""

    wall_hours: PositiveFloat | None = None
    """Sum of the iterations' wall time; waiting in between is not counted."""
    gpu_hours: PositiveFloat | None = None
    cpu_hours: PositiveFloat | None = None
    generated_tokens: PositiveFloat | None = None
    money: PositiveFloat | None = None
    """In the currency of `cost.prices`."""


class CostConfig(Section):
    """Accounting by stage, and the budget."""

    trainer_gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs that the trainer holds: the whole iteration where it stays open, only its stage with `train.service.kind: process`.
    The engine's are `generation.replicas` × `generation.gpus_per_replica`, held all the time."""
    prices: PriceTable = PriceTable()
    budget: Budget = Budget()
    on_reached: Literal["pause", "stop"] = "pause"
    """When a limit of the budget is reached. `pause` lets a flow run of a deployment wait, without a process, for a person who
    raises it in Prefect's form or by `roundhouse runs resume --budget`; a run in a terminal ends, and goes on so too. `stop`
    fails the flow run."""
