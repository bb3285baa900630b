"""Where the roles of a run are, said before anything is started.

Invariant: this is read from the configuration alone, and names what the stages do with it; a role stands in exactly one line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundhouse.config.colocation import engine_sleeps
from roundhouse.config.distribution import InProcessCollection, JobShards
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.train_service import ProcessService, RayService, RemoteService

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig

FLOW = "in the flow's process"


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """A role and where it is."""

    role: str
    where: str
    gpus: float = 0
    """Of all its processes together."""
    shares: str = ""
    """What it shares with another role, and when it gives it back."""

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        shares = f"; {self.shares}" if self.shares else ""
        return f"{self.role + ':':<11}{self.where}{gpus}{shares}"


_BESIDE_ENGINE = {
    "none": "",
    "spread": "on another node than the engine",
    "node": "on the engine's node",
    "gpu": "on the engine's GPU",
}


def placement(config: RunConfig) -> list[RolePlacement]:
    """The places of a run's roles, in the order of an iteration."""
    engine, trainer = _engine(config), _trainer(config)
    if engine_sleeps(config):
        engine = replace(engine, shares="asleep while the trainer works: its weights and cache give their memory back")
    near = _BESIDE_ENGINE[config.placement.colocation]
    turns = "holds memory only in its turn" if engine_sleeps(config) else ""
    trainer = replace(trainer, shares="; ".join(filter(None, (near, turns))))
    return [engine, _collector(config), RolePlacement("validator", FLOW), trainer]


def _engine(config: RunConfig) -> RolePlacement:
    generation, infra = config.generation, config.infra
    gpus = generation.gpus_per_replica * generation.replicas
    if generation.engine_url is not None:
        return RolePlacement("engine", f"a process of its own at {generation.engine_url}", gpus)
    count = f"{generation.replicas} replica{'s' if generation.replicas > 1 else ''}"
    if isinstance(infra, KubernetesInfra) and infra.engine is not None:
        return RolePlacement(
            "engine", f"{count} in RayService {infra.engine.ray_service}, namespace {infra.namespace}", gpus
        )
    return RolePlacement("engine", f"{count}, Ray Serve actors on the flow's Ray cluster", gpus)


def _collector(config: RunConfig) -> RolePlacement:
    distribution = config.rollout.distribution
    beside = ", beside training" if config.asynchrony.staleness > 0 else ""
    if isinstance(distribution, InProcessCollection):
        return RolePlacement("collector", FLOW + beside)
    if isinstance(distribution, JobShards) and isinstance(config.infra, KubernetesInfra):
        where = f"{distribution.shards} shards, a Job of one pod each in namespace {config.infra.namespace}"
        return RolePlacement("collector", where + beside)
    return RolePlacement(
        "collector", f"{distribution.shards} shards ({distribution.kind}), each a process of its own{beside}"
    )


def _trainer(config: RunConfig) -> RolePlacement:
    service, infra = config.train.service, config.infra
    if isinstance(service, ProcessService):
        processes = f"{service.processes} process{'es' if service.processes > 1 else ''}"
        if isinstance(infra, KubernetesInfra):
            pods = infra.trainer.pods
            each = f"{pods} pod{'s' if pods > 1 else ''} of {processes}"
            return RolePlacement(
                "trainer", f"a Job a step in namespace {infra.namespace}: {each}", pods * infra.trainer.gpus
            )
        return RolePlacement("trainer", f"{processes} a step on the flow's machine")
    if isinstance(service, RayService):
        cluster = service.address or "the flow's Ray cluster, else a local one"
        return RolePlacement("trainer", f"an actor on {cluster}", service.gpus)
    if isinstance(service, RemoteService):
        return RolePlacement("trainer", f"a server at {service.url}")
    return RolePlacement("trainer", FLOW if engine_sleeps(config) else FLOW + ", kept between iterations")
