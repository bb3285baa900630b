"""Checks of the places of a run: engine, trainer and collectors on GPUs, machines and pods.

Invariant: every error names key, value and remedy.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from roundhouse.config.engines import engine_traits
from roundhouse.config.environments import environments_in
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.placement import engine_sleeps, trainer_launcher, trainer_machines
from roundhouse.config.rollout import InProcessCollection, JobShards, ProcessShards
from roundhouse.config.training import ProcessService, RankedService, RayService, ResidentService

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


def check_placement(config: RunConfig, *, recorded: bool) -> None:
    """Refuse places that do not exist, are shared wrongly or are not reached.

    Args:
        recorded: the configuration belongs to a stored run.

    Raises:
        ValueError: names key, value and remedy.
    """
    _placement(config)
    if not recorded:
        _ray_launcher(config)
        _trainer_launcher(config)
        _placed_by_launcher(config)
        _ranks_in_groups(config)
    _distribution(config)


def _placement(config: RunConfig) -> None:
    """Refuse impossible placements, and a sleep that frees nothing or stops the run.

    Raises:
        ValueError: names key, value and remedy.
    """
    nearness = config.placement.colocation
    if (nearness == "none" and not engine_sleeps(config)) or engine_traits(
        config.generation.backend
    ).train_service is not None:
        return
    if config.infra.kind == "kubernetes":
        raise ValueError(
            f"{_set(config)}, but with infra.kind kubernetes trainer and engine are in pods, which manifests place. Leave the "
            "section placement out, and use node selectors (infra.trainer.node_selector, the RayService's pods)."
        )
    if config.train.service.is_elsewhere:
        raise ValueError(
            f"{_set(config)}, but train.service.kind is {config.train.service.kind}: the server is where it was started, and "
            "keeps its memory. Set train.service.kind to resident, process or ray, or leave the section placement out."
        )
    if engine_sleeps(config):
        if config.asynchrony.staleness > 0:
            raise ValueError(
                f"{_set(config)}, so the engine sleeps while the trainer works, but asynchrony.staleness is "
                f"{config.asynchrony.staleness}: both would be busy at once. Set asynchrony.staleness to 0, or "
                "placement.colocation to node or spread and placement.engine_sleeps to false."
            )
        if config.generation.backend == "vllm" and config.generation.gpus_per_replica == 0:
            raise ValueError(
                f"{_set(config)}, but generation.backend is vllm with generation.gpus_per_replica 0: vLLM on CPU answers a "
                "call to sleep and frees nothing. Set generation.gpus_per_replica, or placement.engine_sleeps to false."
            )
    elif nearness == "gpu":
        raise ValueError(
            "placement.engine_sleeps is false, but placement.colocation is gpu: both would hold the GPU's memory at "
            "once. Set the first to true or unset it, or the second to node."
        )
    if nearness == "gpu":
        _shared_gpu(config)
    if nearness != "none":
        _nodes(config)


def _set(config: RunConfig) -> str:
    nearness = config.placement.colocation
    if nearness == "none":
        return "placement.engine_sleeps is true"
    return f"placement.colocation is {nearness}"


def _shared_gpu(config: RunConfig) -> None:
    generation, service = config.generation, config.train.service
    if generation.gpus_per_replica == 0 or config.train.device == "cpu":
        key, value = ("generation.gpus_per_replica", 0) if generation.gpus_per_replica == 0 else ("train.device", "cpu")
        raise ValueError(
            f"placement.colocation is gpu, but {key} is {value}: no GPU can be shared. Change it, or set "
            "placement.colocation to node."
        )
    if isinstance(service, RankedService) and service.processes > 1:
        raise ValueError(
            f"placement.colocation is gpu, but train.service.processes is {service.processes}: each needs one GPU. "
            "Set it to 1, or placement.colocation to node."
        )
    if isinstance(service, RayService):
        together = generation.gpus_per_replica + service.gpus
        if service.gpus == 0 or together > 1:
            raise ValueError(
                f"placement.colocation is gpu, but generation.gpus_per_replica ({generation.gpus_per_replica:g}) and "
                f"train.service.gpus ({service.gpus:g}) are not parts of one GPU. Set both above 0 and together to at most 1, "
                "for example 0.5 each."
            )


def _nodes(config: RunConfig) -> None:
    """Refuse `node` placement unless the run has one machine or one reservation of a Ray cluster."""
    generation, nearness = config.generation, config.placement.colocation
    if not isinstance(config.train.service, RayService):
        assert isinstance(config.train.service, ResidentService | ProcessService)
        if nearness == "spread":
            raise ValueError(
                f"placement.colocation is spread, but train.service.kind is {config.train.service.kind}, on the flow's "
                "machine, where its engine is too. Set train.service.kind to ray, or placement.colocation to none."
            )
        if generation.engine_url is not None and not _is_loopback(generation.engine_url):
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


def _trainer_launcher(config: RunConfig) -> None:
    """Refuse a launcher without a section in `infra`, missing or idle GPUs, and unused machines."""
    infra, service, launcher = config.infra, config.train.service, trainer_launcher(config)
    if launcher == "kubernetes" and not isinstance(infra, KubernetesInfra):
        raise ValueError(
            f"train.service.launcher is kubernetes, but infra.kind is {infra.kind}. Set infra.kind to kubernetes, or "
            "train.service.launcher to subprocess."
        )
    if isinstance(infra, KubernetesInfra):
        key, machines, by = "infra.trainer.pods", infra.trainer.pods, "kubernetes"
    else:
        key, machines, by = "infra.ray.trainer.nodes", infra.ray.trainer.nodes, "ray"
    if launcher != by:
        if machines > 1 and ":" not in (launcher or ""):
            has = f"launcher is {launcher}" if launcher else f"kind is {service.kind}"
            raise ValueError(
                f"{key} is {machines}, but train.service.{has}: the trainer is not there. Set train.service.launcher to {by} "
                "(kind resident or process), or remove the key."
            )
        return
    assert isinstance(service, ProcessService | ResidentService), "the kinds that have a launcher"
    gpus = infra.trainer.gpus if isinstance(infra, KubernetesInfra) else infra.ray.trainer.gpus
    section, processes = key.rpartition(".")[0], service.processes
    if gpus > processes:
        raise ValueError(
            f"{section}.gpus is {gpus:g}, but train.service.processes is {processes}, and each process trains on one GPU: the "
            f"others of its machine would be idle. Set train.service.processes to {gpus:g}, or lower the first."
        )
    if by == "ray" and 0 < gpus < processes:
        raise ValueError(
            f"infra.ray.trainer.gpus is {gpus:g}, but train.service.processes is {processes}, and each process trains on one "
            f"GPU. Set the first to {processes}, or to 0 to train on CPUs."
        )


def _placed_by_launcher(config: RunConfig) -> None:
    """Refuse a placement if another launcher places the trainer."""
    launcher = trainer_launcher(config)
    if launcher in ("ray", "kubernetes") and (config.placement.colocation != "none" or engine_sleeps(config)):
        raise ValueError(
            f"{_set(config)}, but train.service.launcher is {launcher}, which trains where it finds room. Set "
            "train.service.launcher to subprocess, or kind to ray, or leave the section placement out."
        )


def _ranks_in_groups(config: RunConfig) -> None:
    service, machines = config.train.service, trainer_machines(config)
    if not isinstance(service, RankedService):
        return
    if ":" not in (trainer_launcher(config) or ""):  # a custom one, which alone knows the number of machines
        service.refuse_uneven(machines)
    ranks, product = machines * service.processes, math.prod(config.train.parallelism.values())
    if service.data_parallel_replicate > 1 and ranks % product:
        key = "infra.ray.trainer.nodes" if trainer_launcher(config) == "ray" else "infra.trainer.pods"
        each = f"{key} {machines} x " if machines > 1 else ""
        raise ValueError(
            f"train.service.data_parallel_replicate is {service.data_parallel_replicate} x context_parallel "
            f"{service.context_parallel}, which does not divide {each}train.service.processes {service.processes}. Set "
            f"processes to {product} or a multiple of it."
        )


def _ray_launcher(config: RunConfig) -> None:
    distribution = config.rollout.distribution
    by_key = {
        "train.service.launcher": trainer_launcher(config) == "ray",
        "rollout.distribution.launcher": isinstance(distribution, ProcessShards) and distribution.launcher == "ray",
    }
    if isinstance(config.infra, KubernetesInfra):
        for key in (key for key, is_ray in by_key.items() if is_ray):
            raise ValueError(f"{key} is ray, but infra.kind is kubernetes, where Jobs do it. Leave the launcher unset.")


def _distribution(config: RunConfig) -> None:
    rollout, distribution, infra = config.rollout, config.rollout.distribution, config.infra
    if isinstance(distribution, InProcessCollection):
        return
    if rollout.concurrency is not None and distribution.shards > rollout.concurrency:
        raise ValueError(
            f"rollout.distribution.shards ({distribution.shards}) is above rollout.concurrency ({rollout.concurrency}), "
            "which the shards have together: each needs one rollout in flight. Lower the first or raise the second."
        )
    if distribution.timeout_seconds <= rollout.timeout_seconds:
        raise ValueError(
            f"rollout.distribution.timeout_seconds ({distribution.timeout_seconds:g}) is the limit of a whole shard and "
            f"not above that of one rollout, rollout.timeout_seconds ({rollout.timeout_seconds:g}). Raise the first."
        )
    if not isinstance(distribution, JobShards):
        return
    if not isinstance(infra, KubernetesInfra):
        raise ValueError(
            f"rollout.distribution.kind is job, but infra.kind is {infra.kind}: Jobs are a cluster's. Set infra.kind to "
            "kubernetes, or rollout.distribution.kind to process."
        )
    if infra.collector is None:
        raise ValueError(
            "rollout.distribution.kind is job, but infra.collector, the pod of a shard, is unset. Add it "
            "(infra.collector: {image: …, cpu: …, memory: …}), or set rollout.distribution.kind to process."
        )
    servers = {
        f"{place}.url": getattr(environment, "url", None)
        for place, environment in environments_in(config.environment).items()
    }
    check_reached_by_pods(config, "rollout.distribution.kind is job", servers)


def check_reached_by_pods(config: RunConfig, setting: str, servers: Mapping[str, str | None]) -> None:
    """Refuse an engine or one of `servers` (URL by key) that the pods of `setting` cannot reach.

    Raises:
        ValueError: names the key, its value and the remedy.
    """
    assert isinstance(config.infra, KubernetesInfra)
    urls = {"generation.engine_url": config.generation.engine_url, **servers}
    if config.infra.engine is not None:
        urls["infra.engine.url"] = config.infra.engine.url
    elif config.generation.engine_url is None:
        raise ValueError(
            f"{setting}, but generation.engine_url and infra.engine are unset: the engine would run on the machine of the "
            "flow, and pods do not reach it. Set one of them."
        )
    for key, url in urls.items():
        if url is not None and _is_loopback(url):
            raise ValueError(
                f"{setting}, but {key} is {url}, which in each of its pods is the pod itself. Name an address that pods reach, "
                "such as a Service's."
            )


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
