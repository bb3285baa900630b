"""What trainer and engine share: the section `placement`, and which settings of it cannot be.

Invariant: it changes where roles are and when they hold memory, never what is computed. Two that share a GPU hold its memory in
turns: the engine sleeps while the trainer works, and what the trainer holds is given back before the engine wakes. A
configuration that cannot hold this is refused here.

`collector` and `validator` are in the flow's process, or in shards (`rollout.distribution`); the trainer shares the flow's
process with `train.service.kind: resident`.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from roundhouse.config.section import Section
from roundhouse.config.train_service import ProcessService, RayService, RemoteService, ResidentService

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


def refuse_unfit_placement(config: RunConfig) -> None:
    """Placements that cannot be, and sleep that would free nothing or stop the run.

    Raises:
        ValueError: names key, value and remedy.
    """
    nearness = config.placement.colocation
    if nearness == "none" and not engine_sleeps(config):
        return
    if config.infra.kind == "kubernetes":
        raise ValueError(
            f"{_set(config)}, but with infra.kind kubernetes trainer and engine are in pods, which manifests place. Leave the "
            "section placement out, and use node selectors (infra.trainer.node_selector, the RayService's pods)."
        )
    if isinstance(config.train.service, RemoteService):
        raise ValueError(
            f"{_set(config)}, but train.service.kind is remote: the server is where it was started, and keeps its memory. Set "
            "train.service.kind to resident, process or ray, or leave the section placement out."
        )
    if engine_sleeps(config):
        _refuse_unfit_sleep(config)
    elif nearness == "gpu":
        raise ValueError(
            "placement.engine_sleeps is false, but placement.colocation is gpu: both would hold the GPU's memory at "
            "once. Set the first to true or unset it, or the second to node."
        )
    if nearness == "gpu":
        _refuse_unfit_gpu(config)
    if nearness != "none":
        _refuse_unfit_nodes(config)


def _set(config: RunConfig) -> str:
    nearness = config.placement.colocation
    if nearness == "none":
        return "placement.engine_sleeps is true"
    return f"placement.colocation is {nearness}"


def _refuse_unfit_sleep(config: RunConfig) -> None:
    if config.asynchrony.staleness > 0:
        raise ValueError(
            f"{_set(config)}, so the engine sleeps while the trainer works, but asynchrony.staleness is "
            f"{config.asynchrony.staleness}: both would be busy at once. Set asynchrony.staleness to 0, or "
            "placement.colocation to node or spread and placement.engine_sleeps to false."
        )
    if config.generation.backend == "vllm" and config.generation.gpus_per_replica == 0:
        raise ValueError(
            f"{_set(config)}, but generation.backend is vllm with generation.gpus_per_replica 0: vLLM on CPU answers a call to "
            "sleep and frees nothing. Set generation.gpus_per_replica, or placement.engine_sleeps to false."
        )


def _refuse_unfit_gpu(config: RunConfig) -> None:
    generation, service = config.generation, config.train.service
    if generation.gpus_per_replica == 0 or config.train.device == "cpu":
        key, value = ("generation.gpus_per_replica", 0) if generation.gpus_per_replica == 0 else ("train.device", "cpu")
        raise ValueError(
            f"placement.colocation is gpu, but {key} is {value}: there is no GPU to share. Change that, or set "
            "placement.colocation to node."
        )
    if isinstance(service, ProcessService) and service.processes > 1:
        raise ValueError(
            f"placement.colocation is gpu, but train.service.processes is {service.processes}: each wants a GPU of "
            "its own. Set it to 1, or placement.colocation to node."
        )
    if isinstance(service, RayService):
        together = generation.gpus_per_replica + service.gpus
        if service.gpus == 0 or together > 1:
            raise ValueError(
                f"placement.colocation is gpu, but generation.gpus_per_replica ({generation.gpus_per_replica:g}) and "
                f"train.service.gpus ({service.gpus:g}) are not parts of one GPU. Set both above 0 and together to at most 1, "
                "for example 0.5 each."
            )


def _refuse_unfit_nodes(config: RunConfig) -> None:
    """One flow's machine, or one reservation of a Ray cluster: nothing else can be held to."""
    generation, nearness = config.generation, config.placement.colocation
    if not isinstance(config.train.service, RayService):
        assert isinstance(config.train.service, ResidentService | ProcessService)
        if nearness == "spread":
            raise ValueError(
                f"placement.colocation is spread, but train.service.kind is {config.train.service.kind}, on the flow's "
                "machine, where its engine is too. Set train.service.kind to ray, or placement.colocation to none."
            )
        if generation.engine_url is not None and not _is_this_machine(generation.engine_url):
            raise ValueError(
                f"placement.colocation is {nearness}, but generation.engine_url ({generation.engine_url}) is another "
                f"machine than the flow's, where train.service.kind {config.train.service.kind} trains. Start the engine here, "
                "or set placement.colocation to none."
            )
        return
    if generation.engine_url is not None:
        raise ValueError(
            f"placement.colocation is {nearness} and train.service.kind ray, but generation.engine_url is set: Ray "
            "does not place that engine. Unset generation.engine_url, or set placement.colocation to none."
        )
    if generation.replicas != 1:
        raise ValueError(
            f"placement.colocation is {nearness} and train.service.kind ray, but generation.replicas is "
            f"{generation.replicas}: the one trainer is reserved together with one replica. Set generation.replicas to 1, or "
            "placement.colocation to none."
        )


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
