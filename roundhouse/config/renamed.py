"""Configuration keys and values that have another name now: refused in a user's configuration, translated in a stored one.

translated({"train": {"updates": 4}})              == {"train": {"minibatches": 4}}
renamed_in({"train": {"updates": 4}})              == ["train.updates: 4 is now train.minibatches: 4"]
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Renamed:
    """A key, or some of its values, under an old name."""

    old: str
    """Dotted key."""
    new: str
    """The same as `old` where only values are renamed."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """New values by old ones; every other value stays."""


RENAMED = (
    Renamed("generation.weights", "generation.weight_sync"),
    Renamed(
        "generation.running",
        "generation.inflight_requests",
        {"finish": "drain", "keep": "continue", "abort": "restart"},
    ),
    Renamed("asynchrony.refit", "asynchrony.refit", {"finish": "drain"}),
    Renamed("placement.trainer_with_engine", "placement.colocation", {"anywhere": "none", "apart": "spread"}),
    Renamed("rollout.tasks", "rollout.prompts_per_iteration"),
    Renamed("rollout.distribution.kind", "rollout.distribution.kind", {"none": "in_process"}),
    Renamed("validation.text", "validation.check_text"),
    Renamed("train.updates", "train.minibatches"),
    Renamed(
        "evaluation.approval.training",
        "evaluation.approval.while_pending",
        {"goes_on": "continue", "waits": "block"},
    ),
    Renamed("evaluation.approval.limit_hours", "evaluation.approval.timeout_hours"),
    Renamed("evaluation.approval.at_limit", "evaluation.approval.on_timeout"),
    Renamed("offline.sample", "offline.precheck_rollouts"),
    Renamed("offline.min_effective_sample_fraction", "offline.min_ess_fraction"),
    Renamed("offline.min_effective_rollout_fraction", "offline.min_rollout_ess_fraction"),
    Renamed("failures.max_skipped_in_a_row", "failures.max_consecutive_skips"),
    Renamed("alerts.reward_over", "alerts.reward_window"),
    Renamed("infra.patience_seconds", "infra.api_outage_seconds"),
)


def renamed_in(tree: Tree) -> list[str]:
    """What a configuration says under an old name, and the new one: one sentence each."""
    return [f"{rename.old}: {_text(old)} is now {rename.new}: {_text(new)}" for rename, old, new in _found(tree)]


def translated(tree: Tree) -> Tree:
    """The configuration under today's names; itself when it is written in them."""
    found = list(_found(tree))
    if not found:
        return tree
    tree = copy.deepcopy(tree)
    for rename, _, new in found:
        *parents, old_leaf = rename.old.split(".")
        section = _section(tree, parents)
        assert section is not None
        new_leaf = rename.new.rsplit(".", 1)[-1]
        # Keys keep their order: a resolved configuration is shown in the order of its fields.
        items = [(new_leaf, new) if key == old_leaf else (key, value) for key, value in section.items()]
        section.clear()
        section.update(items)
    return tree


HTTP_SWITCHES = ("async_engine", "expose_http_server")
_OF_VLLM_CFG = {
    "max_model_len": "max_model_len",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "precision": "dtype",
}
"""Keys of NeMo RL's `vllm_cfg`, as the section generation has them."""
_ENGINE_ARGUMENTS = ("tensor_parallel_size", "pipeline_parallel_size", "enforce_eager", "kv_cache_dtype")
"""Keys of it that are vLLM's own, for `generation.engine_args`."""


def from_nemo_rl(tree: Any) -> Any:
    """A configuration with NeMo RL's `policy.model_name`, `policy.generation` and `env` (its switch of NeMo Gym) in the
    sections that say it here; any other as it is.

    Raises:
        ValueError: one of the three switches that NeMo RL asks for is not on, the section says something else, or the policy
            is Megatron's.
    """
    tree = _policy_of_nemo_rl(_model_named_in_generation(tree))
    if not isinstance(tree, dict) or "env" not in tree:
        return tree
    tree = copy.deepcopy(tree)
    env = tree.pop("env")
    if not isinstance(env, dict) or not env.keys() <= {"should_use_nemo_gym", "nemo_gym"}:
        raise ValueError(
            "env has other keys than should_use_nemo_gym and nemo_gym. Name the environment in `environment`."
        )
    if env.get("should_use_nemo_gym") is not True:
        raise ValueError(
            "env.should_use_nemo_gym is not true. Set it, or leave env out and name the environment in `environment`."
        )
    environment = tree.get("environment") or {}
    if (kind := environment.get("kind", "nemo_gym")) != "nemo_gym":
        raise ValueError(
            f"env.should_use_nemo_gym is true, and environment.kind is {kind}: a run has one environment. Leave one of the two "
            "out, or mix them: environment: {kind: mixture, environments: {…}}, with NeMo Gym's as one of kind nemo_gym."
        )
    gym = dict(env.get("nemo_gym") or {})
    if not (paths := gym.pop("config_paths", None)):
        raise ValueError("env.nemo_gym.config_paths is unset: name NeMo Gym's configuration files.")
    if nested := [key for key, value in gym.items() if isinstance(value, dict | list)]:
        raise ValueError(f"env.nemo_gym.{nested[0]} is a section: put it into a file, and name that in config_paths.")
    settings = [f"++{key}={_text(value)}" for key, value in gym.items()]
    given = {"kind": "nemo_gym", "config_paths": paths} | ({"overrides": settings} if settings else {})
    return tree | {"environment": given | environment}


def _policy_of_nemo_rl(tree: Any) -> Any:
    """`policy.model_name` is the policy that a run begins with, and `policy.generation` the section generation.

    Raises:
        ValueError: it is Megatron's policy, or says what is not carried out here, or what the section says too.
    """
    policy = tree.get("policy") if isinstance(tree, dict) else None
    if not isinstance(policy, dict):
        return tree
    if "megatron_cfg" in policy:
        raise ValueError(
            "policy.megatron_cfg is given, which needs megatron-core and CUDA. Leave it out, and move policy.generation to the "
            "section generation, with backend trainer: it generates in the trainer as well, and mcore_generation_config has "
            "buffer_size_gb and max_tokens."
        )
    own = {key: value for key, value in policy.items() if key != "generation"}
    if own.keys() == {"model_name"}:
        own = {"kind": "pretrained", "path": policy["model_name"]}
    rest = {key: value for key, value in tree.items() if key != "policy"} | ({"policy": own} if own else {})
    if "generation" not in policy:
        return rest
    moved, here = _generation_of_nemo_rl(policy["generation"] or {}, gym="env" in tree), tree.get("generation") or {}
    if both := sorted(moved.keys() & here.keys()):
        raise ValueError(f"policy.generation and generation both say {both[0]}. Say it in generation alone.")
    return rest | {"generation": {**here, **moved}}


def _generation_of_nemo_rl(given: Tree, *, gym: bool) -> Tree:
    """`policy.generation` as the section generation has it."""
    vllm = given.get("vllm_cfg") or {}
    moved = {key: value for key, value in given.items() if key != "vllm_cfg"}
    arguments = {}
    for key in HTTP_SWITCHES:
        if vllm.get(key, None if gym else True) is not True:
            why = "env.should_use_nemo_gym is: Gym reaches the engine over HTTP" if gym else "it always is here"
            raise ValueError(
                f"policy.generation.vllm_cfg.{key} is not true, but {why}. Set it to true, or leave policy.generation out: "
                "Roundhouse's engine always serves HTTP."
            )
    for key, value in vllm.items():
        if key in _OF_VLLM_CFG:
            moved[_OF_VLLM_CFG[key]] = value
        elif key in _ENGINE_ARGUMENTS:
            arguments[key] = value
        elif key not in HTTP_SWITCHES:
            raise ValueError(
                f"policy.generation.vllm_cfg.{key} is {_text(value)}, which is not known here. Leave it out, or set what it "
                "is for in generation or generation.engine_args."
            )
    return moved | ({"engine_args": arguments} if arguments else {})


def _model_named_in_generation(tree: Any) -> Any:
    """`generation.model_name` is the policy that a run begins with.

    Raises:
        ValueError: the section policy names one too.
    """
    generation = tree.get("generation") if isinstance(tree, dict) else None
    if not isinstance(generation, dict) or "model_name" not in generation:
        return tree
    if tree.get("policy"):
        raise ValueError(
            f"generation.model_name is {generation['model_name']!r}, and the section policy is given too. Name the model in "
            "policy alone: policy.kind pretrained, policy.path."
        )
    rest = {key: value for key, value in generation.items() if key != "model_name"}
    return tree | {"generation": rest, "policy": {"kind": "pretrained", "path": generation["model_name"]}}


def _found(tree: Tree) -> Iterator[tuple[Renamed, Any, Any]]:
    """Each rename that the configuration needs, with the value it has and the one it is to have."""
    for rename in RENAMED:
        *parents, leaf = rename.old.split(".")
        section = _section(tree, parents)
        if section is None or leaf not in section:
            continue
        old = section[leaf]
        new = rename.values.get(old, old) if isinstance(old, str) else old
        if rename.new != rename.old or new != old:
            yield rename, old, new


def _section(tree: Any, parents: list[str]) -> Tree | None:
    """The section of this path; None where the configuration leaves it out."""
    for parent in parents:
        tree = tree.get(parent) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else None


def _text(value: Any) -> str:
    """As YAML has it; a section or a list is left out."""
    return "…" if isinstance(value, dict | list) else value if isinstance(value, str) else json.dumps(value)
