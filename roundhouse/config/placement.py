"""Placement of a run's roles, and sharing between trainer and engine: the section `placement`.

Invariants: placement changes where roles run and when they hold memory, never results. Two roles that share a GPU take
turns at its memory: the engine sleeps during training, and the trainer releases its memory before the engine wakes.
Configurations that cannot hold this are refused (`config.checks`). `placement()` reads only the configuration, before
anything starts; each role has exactly one line.

`collector` and `validator` are in the flow's process, or in shards (`rollout.distribution`); the trainer shares the
flow's process with `train.service.kind: resident`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from roundhouse.config.engines import engine_traits
from roundhouse.config.environments import environment_traits, environments_in
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.operations import LocalInfra
from roundhouse.config.rollout import InProcessCollection, JobShards
from roundhouse.config.section import Section
from roundhouse.config.training import ProcessService, RankedService, RayService, ResidentService

if TYPE_CHECKING:
    from roundhouse.config.generation import GenerationConfig
    from roundhouse.config.models import RunConfig

Nearness = Literal["none", "spread", "node", "gpu"]
REPLICA_CPUS = 0.1
"""CPUs that Ray reserves for a replica; Ray plans with it and does not enforce it."""


class PlacementConfig(Section):
    """Sharing between trainer and engine."""

    colocation: Nearness = "none"
    """none: each wherever there is room. spread: on two nodes. node: on one node. gpu: on one GPU, which they hold in
    turns. With `train.service.kind: ray`, Ray reserves the trainer's share together with the engine's replica (a
    placement group)."""
    engine_sleeps: bool | None = None
    """During training, the engine releases the memory of its weights and its cache, and the trainer its own before the
    engine wakes. Unset: if they share a GPU."""


def engine_sleeps(config: RunConfig) -> bool:
    """Return whether the engine of this run sleeps while its trainer works."""
    chosen = config.placement.engine_sleeps
    if engine_traits(config.generation.backend).train_service is not None:
        return True
    return config.placement.colocation == "gpu" if chosen is None else chosen


def trainer_makes_room(config: RunConfig) -> bool:
    """Return whether the trainer releases its memory after each step, for an engine with separate weights."""
    return engine_sleeps(config) and engine_traits(config.generation.backend).train_service is None


def served_generation(config: RunConfig) -> GenerationConfig:
    """Return `generation` for the engine's start, with sleep mode if the engine must sleep."""
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
    """Return Ray's common reservation for trainer and engine, or None."""
    nearness, service = config.placement.colocation, config.train.service
    if nearness == "none" or not isinstance(service, RayService):
        return None
    engine = {"CPU": REPLICA_CPUS, "GPU": config.generation.gpus_per_replica}
    trainer = {"CPU": service.cpus, "GPU": service.gpus}
    if nearness == "gpu":
        return Reservation([{name: engine[name] + trainer[name] for name in engine}], "STRICT_PACK")
    bundles = [{name: amount for name, amount in each.items() if amount > 0} for each in (engine, trainer)]
    return Reservation(bundles, "STRICT_PACK" if nearness == "node" else "STRICT_SPREAD")


FLOW = "in the flow's process"


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """A role and its place."""

    role: str
    where: str
    gpus: float = 0
    """GPUs of all its processes together."""
    shares: str = ""
    """Resources shared with another role, and the time of their release."""

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
    if trainer_makes_room(config):
        engine = replace(engine, shares="asleep while the trainer works: its weights and cache give their memory back")
    near = _BESIDE_ENGINE[config.placement.colocation]
    turns = "holds memory only in its turn" if trainer_makes_room(config) else ""
    trainer = replace(trainer, shares="; ".join(filter(None, (near, turns))))
    return [engine, *_gym(config), _collector(config), RolePlacement("validator", FLOW), trainer]


def _engine(config: RunConfig) -> RolePlacement:
    generation, infra = config.generation, config.infra
    gpus = generation.gpus_per_replica * generation.replicas
    if engine_traits(generation.backend).train_service is not None:
        return RolePlacement("engine", "the trainer itself, asked in its turn")
    if generation.endpoint is not None:
        return RolePlacement("engine", f"the server at {generation.endpoint.url}")
    if generation.engine_url is not None:
        return RolePlacement("engine", f"a separate process at {generation.engine_url}", gpus)
    count = f"{generation.replicas} replica{'s' if generation.replicas > 1 else ''}"
    if isinstance(infra, KubernetesInfra) and infra.engine is not None:
        return RolePlacement(
            "engine",
            f"{count} in RayService {infra.engine.ray_service or 'of the run'}, namespace {infra.namespace}",
            gpus,
        )
    return RolePlacement("engine", f"{count}, Ray Serve actors on the flow's Ray cluster", gpus)


def _gym(config: RunConfig) -> list[RolePlacement]:
    """The servers of a NeMo Gym of the run's own, if it has one."""
    if not any(environment_traits(each).servers is not None for each in environments_in(config.environment).values()):
        return []
    if isinstance(config.infra, KubernetesInfra):
        return [RolePlacement("gym", f"a pod for each server in namespace {config.infra.namespace}")]
    return [RolePlacement("gym", "a process for each server on the flow's machine")]


def _collector(config: RunConfig) -> RolePlacement:
    distribution = config.rollout.distribution
    beside = ", during training" if config.asynchrony.staleness > 0 else ""
    if isinstance(distribution, InProcessCollection):
        return RolePlacement("collector", FLOW + beside)
    if isinstance(distribution, JobShards) and isinstance(config.infra, KubernetesInfra):
        where = f"{distribution.shards} shards, a Job of one pod each in namespace {config.infra.namespace}"
        return RolePlacement("collector", where + beside)
    return RolePlacement(
        "collector", f"{distribution.shards} shards ({distribution.kind}), each in a separate process{beside}"
    )


def has_ranks(service: ResidentService) -> bool:
    """Return whether it trains in separate processes, not in that of the train stage."""
    return service.processes > 1 or service.launcher != "subprocess"


def trainer_launcher(config: RunConfig) -> str | None:
    """Return the launcher of the trainer's processes; None if the run does not start them, or the flow's own process
    trains."""
    service = config.train.service
    if isinstance(service, ProcessService):
        return service.launcher or ("kubernetes" if isinstance(config.infra, KubernetesInfra) else "subprocess")
    return service.launcher if isinstance(service, ResidentService) and has_ranks(service) else None


def trainer_machines(config: RunConfig) -> int:
    """Return the number of machines, pods or Ray nodes that train together, with `train.service.processes` on each."""
    launcher, infra = trainer_launcher(config), config.infra
    if isinstance(infra, KubernetesInfra):
        return infra.trainer.pods if launcher == "kubernetes" else 1
    return infra.ray.trainer.nodes if isinstance(infra, LocalInfra) and launcher == "ray" else 1


def _trainer(config: RunConfig) -> RolePlacement:
    service, infra = config.train.service, config.infra
    launcher, machines = trainer_launcher(config), trainer_machines(config)
    if isinstance(service, ProcessService) or (
        isinstance(service, ResidentService) and launcher not in (None, "subprocess")
    ):
        processes = f"{service.processes} process{'es' if service.processes > 1 else ''}"
        lifetime = "a step" if isinstance(service, ProcessService) else "kept between iterations"
        if isinstance(infra, KubernetesInfra) and launcher == "kubernetes":
            pods = f"{machines} pod{'s' if machines > 1 else ''} of {processes}"
            gpus = machines * infra.trainer.gpus
            return RolePlacement("trainer", f"a Job {lifetime} in namespace {infra.namespace}: {pods}", gpus)
        if isinstance(infra, LocalInfra) and launcher == "ray":
            nodes = "a node" if machines == 1 else f"each of {machines} nodes"
            where = f"{processes} {lifetime} on {nodes} of {infra.ray.address or 'the Ray cluster'}"
            return RolePlacement("trainer", where, machines * infra.ray.trainer.gpus)
        on = "on the flow's machine" if launcher == "subprocess" else f"by {launcher}"
        return RolePlacement("trainer", f"{processes} {lifetime} {on}")
    if isinstance(service, RayService):
        cluster = service.address or "the flow's Ray cluster, else a local one"
        ranks = f" with {service.processes} ranks" if service.processes > 1 else ""
        return RolePlacement("trainer", f"an actor{ranks} on {cluster}", service.gpus)
    if service.is_elsewhere:
        return RolePlacement("trainer", service.place)
    lifetime = "" if trainer_makes_room(config) else ", kept between iterations"
    if isinstance(service, RankedService) and service.processes > 1:
        sharing, replicas = service.context_parallel * service.tensor_parallel, service.data_parallel_replicate
        shared = "" if sharing == 1 else f", {sharing} to a microbatch"
        replica_text = "" if replicas == 1 else f" in {replicas} replicas"
        return RolePlacement(
            "trainer", f"{service.processes} ranks{replica_text}{shared} on the flow's machine{lifetime}"
        )
    return RolePlacement("trainer", FLOW + lifetime)
