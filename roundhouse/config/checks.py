"""Checks of settings that concern more than one section of the configuration.

Invariant: a section checks itself at its declaration; only this module checks several sections together. Errors name key,
value and remedy.

Stale rollouts: in an accepted configuration, each token that may be stale has a bounded weight that corrects for the sampling
policy, or a loss that needs no correction. The bound is on the token's weight, or (seq-mask-tis, GSPO) on the geometric mean
over its sequence; the bound of the KL term is `roundhouse.training.loss.KL_WEIGHT_BOUND`.

The trainer computes `old` with its initial weights, but the engine sampled with older ones. The ratio exp(cur - old) does not
contain that lag. Only the mismatch correction exp(old - gen) does, token by token, even across a refit.

    refused setting                    reason
    mismatch_correction: none, auto    the gradient belongs to the samples of another distribution, with any clip
    seq-mask-tis with its defaults     0.999 to 1.002 is for rounding; a version of lag removes nearly everything
    importance_ratio: on_policy        it means cur = old = gen
    KL in the loss, unweighted         estimates the KL from tokens that the policy did not sample
    rollout.dynamic_sampling, window   a round is judged after all of its groups; a window takes quick ones first

Accepted: cross_entropy, which learns from chosen rollouts of any policy, and `validation.recompute_tolerance`, which judges
only sequences of the version that trains.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from roundhouse.config.algorithms import (
    UNCORRECTED,
    PolicyGradient,
    PPOConfig,
    ReinforcePlusPlusConfig,
    TokenLoss,
)
from roundhouse.config.engines import engine_traits
from roundhouse.config.environments import (
    AgentEnvironment,
    CommandEnvironment,
    MixtureEnvironment,
    NemoGymEnvironment,
    RemoteEnvironment,
    WorkerEnvironment,
    environments_in,
)
from roundhouse.config.generation import (
    check_transport,
    inflight_requests,
    refits_in_flight,
)
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.operations import evaluation_sampling, with_set
from roundhouse.config.placement import engine_sleeps, trainer_launcher, trainer_machines, trainer_makes_room
from roundhouse.config.rollout import Asynchrony, InProcessCollection, JobShards, ProcessShards
from roundhouse.config.training import ProcessService, RankedService, RayService, ResidentService
from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


def check_combinations(config: RunConfig, *, recorded: bool) -> None:
    """Refuse settings that cannot work together.

    Args:
        recorded: the configuration belongs to a stored run; it is read, not carried out.

    Raises:
        ValueError: names key, value and remedy.
    """
    _environments(config)
    _by_environment(config)
    _passes(config)
    _groups(config, recorded=recorded)
    for problem in _unbranchable(config):
        raise ValueError(f"rollout.branching is set, but {problem}, or leave branching out.")
    _sampling(config)
    _addresses(config)
    _trainer_as_engine(config)
    if (unfit := config.asynchrony.unfit_window(config.rollout.prompts_per_iteration)) is not None:
        raise ValueError(unfit)
    if config.offline is not None and (unsound := unsound_for_old_samples(config.train.algorithm)):
        raise ValueError("offline data was sampled by another policy. " + " ".join(unsound))
    _endpoint(config)
    _refits(config, recorded=recorded)
    _placement(config)
    _train_service(config)
    if not recorded:
        _ray_launcher(config)
        _trainer_launcher(config)
        _placed_by_launcher(config)
        _ranks_in_groups(config)
        _optimizer_every(config)
        _judge_prices(config)
    _distribution(config)


def _judge_prices(config: RunConfig) -> None:
    """Refuse a budget in money if the price of a judge is missing."""
    budget, priced = config.cost.budget.money, config.cost.prices.judges
    if budget is None:
        return
    sections = {"": config.environment} | {
        f"evaluation.sets.{name}.": each.environment
        for name, each in config.evaluation.sets.items()
        if each.environment is not None
    }
    for prefix, section in sections.items():
        for key, each in environments_in(section).items():
            for name, criteria in (("rubric", each.rubric), ("audit", each.audit)):
                model = None if criteria is None or criteria.judge is None else criteria.judge.model
                if model is not None and model not in priced:
                    raise ValueError(
                        f"cost.budget.money is {budget:g}, but {prefix}{key}.{name}.judge.model is {model}, which has no "
                        f"price. Give cost.prices.judges: {{{model}: {{prompt: …, completion: …}}}}, with 0 if it is free."
                    )


def _environments(config: RunConfig) -> None:
    """Refuse an environment without training tasks, and two evaluations with one name."""
    environment = config.environment
    if not isinstance(environment, MixtureEnvironment) or environment.train_tasks is None:
        for key, each in environments_in(environment).items():
            own_rows = RemoteEnvironment | AgentEnvironment | CommandEnvironment | NemoGymEnvironment
            if isinstance(each, own_rows) and each.train_tasks is None:
                raise ValueError(f"{key}.train_tasks is unset: name the JSON lines file of its training task rows.")
    for key, each in environments_in(environment).items():
        agents = AgentEnvironment | CommandEnvironment | NemoGymEnvironment | WorkerEnvironment
        if config.rollout.system_prompt is not None and isinstance(each, agents):
            raise ValueError(
                f"rollout.system_prompt is set, but {key}.kind is {each.kind}, which begins conversations itself. Unset it, "
                "and write the text into the rows (responses_create_params.instructions) or into the agent."
            )
        if config.rollout.cut_replies == "return" and isinstance(each, agents):
            raise ValueError(
                f"rollout.cut_replies is return, but {key}.kind is {each.kind}, and its program decides what follows a reply. "
                "Remove rollout.cut_replies."
            )
    gyms = [key for key, each in environments_in(environment).items() if isinstance(each, NemoGymEnvironment)]
    if len(gyms) > 1:
        raise ValueError(
            f"{gyms[0]} and {gyms[1]} are both of kind nemo_gym: a run starts one set of servers. Name the files of both in "
            "config_paths of one; its rows name their agents."
        )
    if gyms and isinstance(config.infra, KubernetesInfra):
        _reached_by_pods(config, f"{gyms[0]}.kind is nemo_gym and infra.kind kubernetes", {})
    if isinstance(environment, MixtureEnvironment) and (
        both := sorted(environment.environments.keys() & config.evaluation.sets.keys())
    ):
        raise ValueError(
            f"evaluation.sets has {', '.join(both)}, the name of an environment in the mixture, which reports its evaluation "
            "under this name. Rename the set."
        )


OWN_LIMITS: dict[str, tuple[str, ...]] = {
    "agent": ("max_turns", "max_tokens", "system_prompt", "parallel_tool_calls"),
    "nemo_gym": ("max_turns", "max_tokens", "system_prompt", "parallel_tool_calls"),
    "worker": ("system_prompt", "parallel_tool_calls"),
    "command": ("system_prompt", "parallel_tool_calls"),
}
"""Keys of `rollout.environments` that the programs of an environment's kind decide themselves."""


def _by_environment(config: RunConfig) -> None:
    """Refuse settings for environments that are not in the mixture or do not support them."""
    mixed = config.environment.environments if isinstance(config.environment, MixtureEnvironment) else {}
    algorithm = config.train.algorithm
    learnt = algorithm.environments if isinstance(algorithm, PolicyGradient) else {}
    for key, names in (("rollout.environments", config.rollout.environments), ("train.algorithm.environments", learnt)):
        if unknown := sorted(set(names) - set(mixed)):
            raise ValueError(
                f"{key} names {', '.join(unknown)}, but environment.environments has {', '.join(mixed) or 'none'}. Name one "
                "of these, in environment: {kind: mixture}."
            )
    room = config.generation.max_model_len
    for name, own in config.rollout.environments.items():
        kind = mixed[name].kind
        for field in OWN_LIMITS.get(kind, ()):
            if (value := getattr(own, field)) is not None:
                raise ValueError(
                    f"rollout.environments.{name}.{field} is {value!r}, but environment.environments.{name}.kind is {kind}, "
                    "and its own program decides that. Remove the key, and set it there."
                )
        if own.max_new_tokens is not None and own.max_new_tokens >= room:
            raise ValueError(
                f"rollout.environments.{name}.max_new_tokens ({own.max_new_tokens}) leaves no room for a prompt in "
                f"generation.max_model_len ({room}). Lower the first or raise the second."
            )


def _passes(config: RunConfig) -> None:
    """Refuse an unreachable end, and epochs without complete passes over the tasks."""
    finish, environment = config.finish, config.environment
    epochs = config.rollout.epochs
    if epochs is not None and config.offline is not None:
        raise ValueError(
            f"rollout.epochs is {epochs}, but a run with the section offline ends after offline.epochs. Set that instead."
        )
    if finish.at_least is not None and finish.metric.startswith("evaluation/") and not config.evaluation.every:
        raise ValueError(
            f"finish.at_least is {finish.at_least} of {finish.metric}, but evaluation.every is {config.evaluation.every}: no "
            "version before the last is evaluated. Set evaluation.every, or finish.metric to reward/mean."
        )
    by_weight = isinstance(environment, MixtureEnvironment) and environment.train_tasks is None
    for key, value in (("rollout.epochs", epochs), ("rollout.drop_last", config.rollout.drop_last)):
        if value and by_weight:
            raise ValueError(
                f"{key} is {value}, but a mixture draws its tasks by weight, with separate epochs for each environment. "
                "Name the rows of all in environment.train_tasks, or remove the key."
            )


def _groups(config: RunConfig, *, recorded: bool) -> None:
    rollout, algorithm = config.rollout, config.train.algorithm
    if rollout.dynamic_sampling is not None and rollout.group_size < 2:
        raise ValueError(
            "rollout.dynamic_sampling wants groups with spread, but rollout.group_size is 1. Raise it, or unset the first."
        )
    if rollout.group_size < 2 and isinstance(algorithm, ReinforcePlusPlusConfig) and algorithm.minus_baseline:
        if not recorded:
            raise ValueError(
                f"rollout.group_size is {rollout.group_size} and train.algorithm.minus_baseline true: the mean of one rollout "
                "is its own reward, so that every advantage is 0. Set minus_baseline to false, or group_size to "
                "2 or more."
            )
    elif rollout.group_size < 2 and algorithm.needs_groups:
        raise ValueError(
            f"rollout.group_size is {rollout.group_size}: a group of one has no baseline. Set it to 2 or more."
        )
    if config.validation.min_group_size > rollout.group_size:
        raise ValueError(
            f"validation.min_group_size ({config.validation.min_group_size}) is above rollout.group_size "
            f"({rollout.group_size}): every group would be omitted. Lower it."
        )
    if config.train.minibatches > rollout.prompts_per_iteration * rollout.group_size:
        raise ValueError(
            f"train.minibatches ({config.train.minibatches}) exceeds the rollouts of an iteration "
            f"({rollout.prompts_per_iteration * rollout.group_size}). Lower it."
        )


def _unbranchable(config: RunConfig) -> Iterator[str]:
    """Yield reasons against branching, with remedies. Preflight checks the environment itself."""
    rollout, algorithm = config.rollout, config.train.algorithm
    if rollout.branching is None:
        return
    for key, each in environments_in(config.environment).items():
        if each.has_own_loop:
            yield (
                f"{key}.kind is {each.kind}, whose own program plays a rollout and cannot start from the replies before a "
                f"branch. Set {key}.kind to remote or custom, the environment behind it"
            )
    limits = {"rollout.max_turns": rollout.max_turns} | {
        f"rollout.environments.{name}.max_turns": own.max_turns
        for name, own in rollout.environments.items()
        if own.max_turns is not None
    }
    for key, turns in limits.items():
        if turns < 2:
            yield f"{key} is {turns}, and a branch begins at a later turn than the first. Raise it"
    if rollout.group_size < 2:
        yield "rollout.group_size is 1, and branching needs groups with different rewards. Raise it"
    if config.validation.min_group_size > rollout.branching.samples:
        yield (
            f"validation.min_group_size is {config.validation.min_group_size}, above rollout.branching.samples "
            f"({rollout.branching.samples}), so that every group of branches would be omitted. Raise samples"
        )
    if config.asynchrony.staleness > 0:
        yield (
            f"asynchrony.staleness is {config.asynchrony.staleness}: overlapped work is planned before rewards are known, and "
            "branching needs the rewards. Set asynchrony.staleness to 0"
        )
    by_token = isinstance(algorithm, PPOConfig | ReinforcePlusPlusConfig)
    if isinstance(algorithm, PolicyGradient) and not by_token and algorithm.kl_placement == "reward":
        yield (
            "train.algorithm.kl_placement is reward, where the KL of shared turns would count against the rollout that its "
            "branches left and not against them. Set train.algorithm.kl_placement to loss"
        )


def _optimizer_every(config: RunConfig) -> None:
    """Refuse `optimizer_every` with a trainer that is loaded for each step: it would repeat up to `optimizer_every` - 1 steps
    each time."""
    every, service = config.checkpoint.optimizer_every, config.train.service
    renewed = config.train.algorithm.reference_every
    if every > 1 and renewed is not None:
        raise ValueError(
            f"train.algorithm.reference_every is {renewed}, but checkpoint.optimizer_every is {every}: iterations that are "
            "trained again would need references that are gone. Set optimizer_every to 1."
        )
    if every == 1:
        return
    if service.runs_whole_steps:
        raise ValueError(
            f"checkpoint.optimizer_every is {every}, but train.service.kind is process: each step begins from the store and "
            "needs the optimizer's state there. Set optimizer_every to 1, or kind to resident, ray or remote."
        )
    if trainer_makes_room(config):
        raise ValueError(
            f"checkpoint.optimizer_every is {every}, but the trainer gives its memory back after each step (placement): it "
            "needs the optimizer's state in the store. Set optimizer_every to 1, or placement.engine_sleeps to false."
        )


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
    processes, staleness = getattr(service, "processes", 1), config.asynchrony.staleness
    for unfit, key, value, remedy in (
        (service.kind != kind, "train.service.kind", service.kind, f"Set it to {kind}"),
        (processes > 1, "train.service.processes", processes, "Set it to 1: ranks hold a part of the model each"),
        (here and trainer_launcher(config) is not None, "train.service.launcher", trainer_launcher(config), "Leave it out"),
        (config.infra.kind == "kubernetes", "infra.kind", "kubernetes", "Set it to local, or generation.backend to vllm"),
        (staleness > 0, "asynchrony.staleness", staleness, "Set it to 0: the trainer trains or generates"),
        (generation.engine_url is not None, "generation.engine_url", generation.engine_url, "Leave it out"),
        (generation.replicas != 1, "generation.replicas", generation.replicas, "Set it to 1"),
        (generation.weight_sync != "trainer", "generation.weight_sync", generation.weight_sync, "Leave it out"),
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
    warm = temperature != 1 and endpoint.kind != "text"
    unproved = endpoint.weight_update not in (None, "vllm") and config.validation.recompute_tolerance is None
    for unfit, key, value, remedy in (
        (generation.engine_url is not None, "generation.engine_url", generation.engine_url, "Leave it out"),
        (generation.replicas != 1, "generation.replicas", generation.replicas, "Leave it out: the server has its own"),
        (generation.gpus_per_replica > 0, "generation.gpus_per_replica", generation.gpus_per_replica, "Leave it out"),
        (generation.threads > 0, "generation.threads", generation.threads, "Leave it out"),
        (generation.weight_sync != "store", "generation.weight_sync", generation.weight_sync, "Set it to store"),
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


def _train_service(config: RunConfig) -> None:
    """Refuse settings that the train service does not support."""
    config.train.service.check_run(config)


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
        f"{place}.url": environment.url
        for place, environment in environments_in(config.environment).items()
        if isinstance(environment, RemoteEnvironment | AgentEnvironment)
    }
    _reached_by_pods(config, "rollout.distribution.kind is job", servers)


def _reached_by_pods(config: RunConfig, setting: str, servers: Mapping[str, str | None]) -> None:
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


DEFAULT_CORRECTION = "tis"
"""Default correction for possible staleness: truncated importance sampling, which drops no token."""
_WIDEST_ROUNDING = 1.05
"""Upper bounds of a sequence's mean ratio below this allow for rounding only, not for other weights."""


def unsound(asynchrony: Asynchrony, config: RunConfig) -> list[str]:
    """Return the faults of a configuration under this asynchrony; empty with staleness 0."""
    if asynchrony.staleness == 0:
        return []
    problems = unsound_for_old_samples(config.train.algorithm, f"asynchrony.staleness is {asynchrony.staleness}, and ")
    if config.rollout.dynamic_sampling is not None and asynchrony.window > 1:
        problems.append(
            f"rollout.dynamic_sampling is set: asynchrony.window is {asynchrony.window}, so that a step takes groups before "
            "slower ones of their round are complete, and whether a round has enough groups with spread is known only then. "
            "Unset it, or set asynchrony.mode to batch-async or fully-async and window to 1."
        )
    return problems


def refuse_unsound(asynchrony: Asynchrony, config: RunConfig) -> None:
    """Refuse a combination that trains on a wrong gradient.

    Raises:
        ConfigError: names each key, its value and the remedy.
    """
    if problems := unsound(asynchrony, config):
        lines = "\n".join(f"  {item}" for item in problems)
        raise ConfigError(
            f"Rollouts may be {asynchrony.staleness} versions old. These settings cannot be right then:\n{lines}"
        )


def with_correction(asynchrony: Asynchrony, config: RunConfig) -> RunConfig:
    """Return the configuration with `DEFAULT_CORRECTION` if rollouts may be stale and no correction is set.

    An explicit correction stays. An explicit `none` is refused later, not replaced.
    """
    algorithm = config.train.algorithm
    chosen = "mismatch_correction" in algorithm.model_fields_set
    if asynchrony.staleness == 0 or not isinstance(algorithm, PolicyGradient) or chosen:
        return config
    if algorithm.mismatch_correction not in UNCORRECTED:
        return config
    corrected = algorithm.model_copy(update={"mismatch_correction": DEFAULT_CORRECTION})
    return config.model_copy(update={"train": config.train.model_copy(update={"algorithm": corrected})})


def unsound_for_old_samples(algorithm: TokenLoss | Any, because: str = "") -> list[str]:
    """Return the settings of an algorithm that are wrong for tokens of another policy: key, value, reason and remedy per line.

    Cross-entropy is accepted: it learns from chosen rollouts of any policy.

    Args:
        because: reason for samples of another policy, as the beginning of the line.
    """
    if not isinstance(algorithm, TokenLoss):
        return []
    problems = []
    if isinstance(algorithm, PolicyGradient):
        correction, bounds = algorithm.mismatch_correction, algorithm.bounds
        if correction in UNCORRECTED:
            some = "nothing" if correction == "none" else "not every sequence"
            problems.append(
                f"train.algorithm.mismatch_correction is {correction}: {because}{some} is corrected for the policy that "
                f"sampled the tokens. Set it to {DEFAULT_CORRECTION} (or icepop, which drops tokens instead of bounding their "
                "weight)."
            )
        elif correction == "seq-mask-tis" and bounds[1] < _WIDEST_ROUNDING:
            problems.append(
                f"train.algorithm.mismatch_bounds is {list(bounds)}: {because}bounds so close to 1 are for rounding between "
                "engine and trainer, and would mask nearly every sequence of another policy. Set them, [0.8, 1.25] for "
                f"example, or mismatch_correction to {DEFAULT_CORRECTION}."
            )
        if algorithm.importance_ratio == "on_policy":
            problems.append(
                f"train.algorithm.importance_ratio is on_policy: {because}on_policy needs rollouts of the policy that trains. "
                "Set it to token."
            )
    if algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss" and not algorithm.kl_importance_weighting:
        problems.append(
            f"train.algorithm.kl_importance_weighting is False: {because}the KL term's tokens were sampled by another policy, "
            "so its estimate is biased. Set it to true, or kl_coefficient to 0."
        )
    return problems
