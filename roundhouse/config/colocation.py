"""What trainer and engine share: the section `placement`.

Invariant: it changes where roles are and when they hold memory, never what is computed. Two that share a GPU hold its memory in
turns: the engine sleeps while the trainer works, and what the trainer holds is given back before the engine wakes. A
configuration that cannot hold this is refused (`config.checks`).

`collector` and `validator` are in the flow's process, or in shards (`rollout.distribution`); the trainer shares the flow's
process with `train.service.kind: resident`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from roundhouse.config.section import Section
from roundhouse.config.train_service import RayService

if TYPE_CHECKING:
    from roundhouse.config.generation import GenerationConfig
    from roundhouse.config.models import RunConfig

Nearness = Literal["none", "spread", "node", "gpu"]
REPLICA_CPUS = 0.1
"""What Ray reserves for a replica: it plans with it, and does not hold a replica to it."""


class PlacementConfig(Section):
    """What trainer and engine share."""

    colocation: Nearness = "none"
    """none: each where there is room. spread: on two nodes. node: on one node. gpu: on one GPU, which they hold in turns.
    With `train.service.kind: ray`, Ray reserves the trainer's share together with the engine's replica (a placement group)."""
    engine_sleeps: bool | None = None
    """While the trainer works, the engine gives its weights' and its cache's memory back, and the trainer its own before the
    engine wakes. Unset: where they share a GPU."""


def engine_sleeps(config: RunConfig) -> bool:
    """Whether the engine of this run sleeps while its trainer works."""
    chosen = config.placement.engine_sleeps
    return config.placement.colocation == "gpu" if chosen is None else chosen


def served_generation(config: RunConfig) -> GenerationConfig:
    """`generation` as the engine is to be started: able to sleep, where it is to sleep."""
    generation = config.generation
    if not engine_sleeps(config) or generation.backend != "vllm":
        return generation
    return generation.model_copy(update={"engine_args": generation.engine_args | {"enable_sleep_mode": True}})


@dataclass(frozen=True, slots=True)
class Reservation:
    """The placement group in which Ray puts the engine's replica (the first bundle) and the trainer's actor (the last).

    Example: with `gpu`, 0.5 GPU for the engine and 0.4 for the trainer, one bundle of {"CPU": 1.1, "GPU": 0.9}.
    """

    bundles: list[dict[str, float]]
    strategy: str


def reservation(config: RunConfig) -> Reservation | None:
    """What Ray reserves for trainer and engine together; None where nothing is."""
    nearness, service = config.placement.colocation, config.train.service
    if nearness == "none" or not isinstance(service, RayService):
        return None
    engine = {"CPU": REPLICA_CPUS, "GPU": config.generation.gpus_per_replica}
    trainer = {"CPU": service.cpus, "GPU": service.gpus}
    if nearness == "gpu":
        return Reservation([{name: engine[name] + trainer[name] for name in engine}], "STRICT_PACK")
    bundles = [{name: amount for name, amount in each.items() if amount > 0} for each in (engine, trainer)]
    return Reservation(bundles, "STRICT_PACK" if nearness == "node" else "STRICT_SPREAD")
