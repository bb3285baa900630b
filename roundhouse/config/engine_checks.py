"""Checks of the engine against the rest of a run: sampling, addresses, the trainer as the engine, endpoints, refits.

Invariant: every error names key, value and remedy.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from roundhouse import plugins
from roundhouse.config.engines import engine_traits
from roundhouse.config.generation import check_transport, inflight_requests, refits_in_flight, transport_traits
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.operations import evaluation_sampling, with_set
from roundhouse.config.placement import trainer_launcher
from roundhouse.config.rollout import JobShards

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


def check_engine(config: RunConfig, *, recorded: bool) -> None:
    """Refuse settings of the engine that do not fit the rest of the run.

    Args:
        recorded: the configuration belongs to a stored run.

    Raises:
        ValueError: names key, value and remedy.
    """
    _sampling(config)
    _images(config)
    _addresses(config)
    _trainer_as_engine(config)
    _endpoint(config)
    _refits(config, recorded=recorded)


def _sampling(config: RunConfig) -> None:
    """Refuse rollouts that cannot be trained on and evaluations that cannot be sampled: an answer as long as the context, or a
    custom engine with sampling other than greedy and the training distribution."""
    own, room, backend = config.generation.sampling, config.generation.max_model_len, config.generation.backend
    if own.max_new_tokens >= room:
        raise ValueError(
            f"generation.sampling.max_new_tokens ({own.max_new_tokens}) leaves no room for a "
            f"prompt in generation.max_model_len ({room}). Lower the first or raise the second."
        )
    if own.temperature == 0:
        raise ValueError(
            "generation.sampling.temperature is 0: greedy rollouts of a group are all equal and teach nothing. "
            "Set it above 0 (evaluation.temperature may be 0)."
        )
    if own.top_p < 1 or own.top_k is not None:
        raise ValueError(
            "generation.sampling.top_p and top_k filter the distribution that the trainer cannot reproduce, so the "
            "policy ratio would be wrong. Leave top_p at 1.0 and top_k unset for training."
        )
    sets = {f"evaluation.sets.{name}": with_set(config, name) for name in config.evaluation.sets}
    for key, each in ({"evaluation": config} | sets).items():
        sampling = evaluation_sampling(each)
        if sampling.max_new_tokens >= room:
            raise ValueError(
                f"{key}.max_new_tokens ({sampling.max_new_tokens}) leaves no room for a prompt in generation.max_model_len "
                f"({room}). Lower the first or raise the second."
            )
        if engine_traits(backend).opener is not None or sampling.temperature == 0:
            continue
        for name in ("temperature", "top_p", "top_k"):
            if (value := getattr(sampling, name)) != (made_for := getattr(own, name)):
                raise ValueError(
                    f"{key}.{name} is {value}, but generation.backend is {backend}, which draws at generation.sampling.{name} "
                    f"({made_for}) or greedily. Set {key}.{name} to {made_for}, or {key}.temperature to 0."
                )


def _images(config: RunConfig) -> None:
    """Refuse settings under which images cannot be shown to the policy or trained on."""
    generation, train, service = config.generation, config.train, config.train.service
    if not generation.images:
        return
    readers = [name for name in plugins.names("engine") if engine_traits(name).reads_images]
    here = service.kind in ("resident", "process") and service.is_on_this_machine
    processes = getattr(service, "processes", 1)
    transport = transport_traits(generation.weight_sync)
    for unfit, key, value, remedy in (
        (config.policy.kind != "pretrained", "policy.kind", config.policy.kind, "Set it to pretrained, with policy.path"),
        (generation.backend not in readers, "generation.backend", generation.backend, f"Set it to {' or '.join(readers)}"),
        (not transport.sends_checkpoint, "generation.weight_sync", generation.weight_sync, "Set it to store"),
        (train.packing is not False, "train.packing", train.packing, "Set it to false: a row with images holds one sequence"),
        (not here, "train.service.kind", service.kind, "Set it to resident or process, without another launcher"),
        (processes > 1, "train.service.processes", processes, "Set it to 1"),
        (config.rollout.max_prompt_tokens is not None, "rollout.max_prompt_tokens", config.rollout.max_prompt_tokens,
         "Leave it out: it counts text"),
    ):  # fmt: skip
        if unfit:
            raise ValueError(f"generation.images is true, but {key} is {value}. {remedy}.")


def _addresses(config: RunConfig) -> None:
    """Refuse two addresses of one engine, and a store that is invalid or out of reach of pods."""
    generation, infra, scheme = config.generation, config.infra, re.match(r"(\w*):/", config.store)
    if generation.engine_url is not None and generation.replicas != 1:
        raise ValueError(
            f"generation.engine_url names one engine, but generation.replicas is {generation.replicas}. Set it to 1."
        )
    if isinstance(infra, KubernetesInfra) and infra.engine is not None and generation.engine_url:
        raise ValueError(
            f"generation.engine_url ({generation.engine_url}) and infra.engine "
            f"({infra.engine.ray_service or infra.engine.manifest}) both name an engine. Unset one."
        )
    if not config.store.strip() or (scheme and not config.store.startswith(("file://", "s3://"))):
        raise ValueError(f"store is {config.store!r}. Set it to a path, file:// or s3://bucket/prefix.")
    if isinstance(infra, KubernetesInfra) and not config.store.startswith("s3://") and not infra.store_claim:
        raise ValueError(
            f"store is {config.store!r}, a directory, which the pods of infra.kind kubernetes cannot read. Use s3://…, or "
            "name a PersistentVolumeClaim in infra.store_claim; it is mounted at that path."
        )


def _trainer_as_engine(config: RunConfig) -> None:
    """Refuse settings that a generating trainer cannot support, and placement or start of another engine."""
    generation, service, placement = config.generation, config.train.service, config.placement
    options = generation.mcore_generation_config
    kind = engine_traits(generation.backend).train_service
    if kind is None:
        if options is not None:
            raise ValueError(
                f"generation.mcore_generation_config is given, but generation.backend is {generation.backend}. Set it to "
                "trainer, or leave the section out."
            )
        return
    here = kind == "resident"
    transport = transport_traits(generation.weight_sync)
    processes, staleness = getattr(service, "processes", 1), config.asynchrony.staleness
    for unfit, key, value, remedy in (
        (service.kind != kind, "train.service.kind", service.kind, f"Set it to {kind}"),
        (processes > 1, "train.service.processes", processes, "Set it to 1: ranks hold a part of the model each"),
        (here and trainer_launcher(config) is not None, "train.service.launcher", trainer_launcher(config), "Leave it out"),
        (config.infra.kind == "kubernetes", "infra.kind", "kubernetes", "Set it to local, or generation.backend to vllm"),
        (staleness > 0, "asynchrony.staleness", staleness, "Set it to 0: the trainer trains or generates"),
        (generation.engine_url is not None, "generation.engine_url", generation.engine_url, "Leave it out"),
        (generation.replicas != 1, "generation.replicas", generation.replicas, "Set it to 1"),
        (not transport.stays_in_trainer, "generation.weight_sync", generation.weight_sync, "Leave it out"),
        (generation.gpus_per_replica > 0, "generation.gpus_per_replica", generation.gpus_per_replica, "Leave it out, and set "
         "train.device"),
        (generation.threads > 0, "generation.threads", generation.threads, "Leave it out, and set train.threads"),
        (here and generation.dtype != config.train.dtype, "generation.dtype", generation.dtype, "Set it to train.dtype, "
         f"{config.train.dtype}"),
        (placement.colocation != "none", "placement.colocation", placement.colocation, "Leave it out"),
        (placement.engine_sleeps is not None, "placement.engine_sleeps", placement.engine_sleeps, "Leave it out"),
        (not here and options is not None, "generation.mcore_generation_config", "given", "Leave it out"),
    ):  # fmt: skip
        if unfit:
            raise ValueError(
                f"generation.backend is {generation.backend}, the trainer itself, but {key} is {value}. {remedy}."
            )
    if options is not None and options.max_tokens < generation.max_model_len:
        raise ValueError(
            f"generation.mcore_generation_config.max_tokens is {options.max_tokens}, less than one request of "
            f"generation.max_model_len ({generation.max_model_len}) may take. Raise the first, or lower the second."
        )


def _endpoint(config: RunConfig) -> None:
    """Refuse settings that a foreign server cannot support, and placement or start of another engine."""
    generation, placement = config.generation, config.placement
    if generation.backend != "openai":
        return
    endpoint = generation.endpoint
    assert endpoint is not None, "refused at load (config.generation)"
    temperature, inflight = generation.sampling.temperature, inflight_requests(config)
    transport = transport_traits(generation.weight_sync)
    warm = temperature != 1 and endpoint.kind != "text"
    unproved = endpoint.weight_update not in (None, "vllm") and config.validation.recompute_tolerance is None
    for unfit, key, value, remedy in (
        (generation.engine_url is not None, "generation.engine_url", generation.engine_url, "Leave it out"),
        (generation.replicas != 1, "generation.replicas", generation.replicas, "Leave it out: the server has its own"),
        (generation.gpus_per_replica > 0, "generation.gpus_per_replica", generation.gpus_per_replica, "Leave it out"),
        (generation.threads > 0, "generation.threads", generation.threads, "Leave it out"),
        (not transport.sends_checkpoint, "generation.weight_sync", generation.weight_sync, "Set it to store"),
        (inflight != "drain", "generation.inflight_requests", inflight, "Set it, or asynchrony.refit, to drain"),
        (warm, "generation.sampling.temperature", temperature, "Set it to 1: the server returns log-probabilities "
         "of the model itself"),
        (unproved, "validation.recompute_tolerance", None, "Set it: nothing else holds the server's weights against "
         "its answers"),
        (placement.colocation != "none", "placement.colocation", placement.colocation, "Leave it out"),
        (bool(placement.engine_sleeps), "placement.engine_sleeps", placement.engine_sleeps, "Leave it out"),
        (isinstance(config.rollout.distribution, JobShards), "rollout.distribution.kind", "job", "Set it to process: requests "
         "pass through the flow's process"),
    ):  # fmt: skip
        if unfit:
            raise ValueError(
                f"generation.backend is openai, a server that runs already, but {key} is {value}. {remedy}."
            )


def _refits(config: RunConfig, *, recorded: bool) -> None:
    """Refuse weight transports and in-flight policies that cannot work in this run.

    Raises:
        ValueError: names key, value and remedy.
    """
    generation = config.generation
    if not recorded:
        check_transport(config)
    if generation.inflight_requests == "drain" and refits_in_flight(config):
        raise ValueError(
            "generation.inflight_requests is drain, but asynchrony.refit is in-flight. Set asynchrony.refit to drain, or "
            "generation.inflight_requests to continue or restart."
        )
    if generation.keep_prefix_cache and inflight_requests(config) != "continue":
        raise ValueError(
            "generation.keep_prefix_cache is true, but no generations are kept over a refit here: answers would use keys and "
            "values of older weights. Set it to false, or generation.inflight_requests to continue."
        )
