"""Checks of settings that concern more than one section of the configuration.

Invariant: a section checks itself at its declaration; this module and its parts (`engine_checks`, `placement_checks`,
`stale_rollouts`) check several sections together. Errors name key, value and remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from roundhouse.config.algorithms import (
    PolicyGradient,
    PPOConfig,
    ReinforcePlusPlusConfig,
)
from roundhouse.config.engine_checks import check_engine
from roundhouse.config.environments import (
    FileEnvironment,
    MixtureEnvironment,
    environment_traits,
    environments_in,
)
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.placement import trainer_makes_room
from roundhouse.config.placement_checks import check_placement, check_reached_by_pods
from roundhouse.config.stale_rollouts import unsound_for_old_samples

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
    if (unfit := config.asynchrony.unfit_window(config.rollout.prompts_per_iteration)) is not None:
        raise ValueError(unfit)
    if config.offline is not None and (unsound := unsound_for_old_samples(config.train.algorithm)):
        raise ValueError("offline data was sampled by another policy. " + " ".join(unsound))
    check_engine(config, recorded=recorded)
    check_placement(config, recorded=recorded)
    _train_service(config)
    if not recorded:
        _optimizer_every(config)
        _judge_prices(config)


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
            if isinstance(each, FileEnvironment) and each.train_tasks is None:
                raise ValueError(f"{key}.train_tasks is unset: name the JSON lines file of its training task rows.")
    for key, each in environments_in(environment).items():
        if config.rollout.system_prompt is not None and each.has_own_loop:
            raise ValueError(
                f"rollout.system_prompt is set, but {key}.kind is {each.kind}, which begins conversations itself. Unset it, "
                "and write the text into the rows (responses_create_params.instructions) or into the agent."
            )
        if config.rollout.cut_replies == "return" and each.has_own_loop:
            raise ValueError(
                f"rollout.cut_replies is return, but {key}.kind is {each.kind}, and its program decides what follows a reply. "
                "Remove rollout.cut_replies."
            )
    serving = {
        key: each.kind
        for key, each in environments_in(environment).items()
        if environment_traits(each).servers is not None
    }
    if len(serving) > 1:
        raise ValueError(
            f"{' and '.join(serving)} are of kind {' and '.join(dict.fromkeys(serving.values()))}: a run starts one set of "
            "servers. Name the files of both in config_paths of one; its rows name their agents."
        )
    for key, kind in serving.items():
        if isinstance(config.infra, KubernetesInfra):
            check_reached_by_pods(config, f"{key}.kind is {kind} and infra.kind kubernetes", {})
    if isinstance(environment, MixtureEnvironment) and (
        both := sorted(environment.environments.keys() & config.evaluation.sets.keys())
    ):
        raise ValueError(
            f"evaluation.sets has {', '.join(both)}, the name of an environment in the mixture, which reports its evaluation "
            "under this name. Rename the set."
        )


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
        for field in mixed[name].own_limits:
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


def _train_service(config: RunConfig) -> None:
    """Refuse settings that the train service does not support."""
    config.train.service.check_run(config)
