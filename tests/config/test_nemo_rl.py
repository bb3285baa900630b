"""NeMo RL's spelling of a run with NeMo Gym: mapped, or refused for the switch that is off."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from roundhouse.config.environments import NemoGymEnvironment
from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError

THEIRS: dict[str, Any] = {
    "run_id": "r",
    "policy": {"generation": {"backend": "vllm", "vllm_cfg": {"async_engine": True, "expose_http_server": True}}},
    "env": {
        "should_use_nemo_gym": True,
        "nemo_gym": {"config_paths": ["math.yaml", "agent.yaml"], "port_range_low": 9000},
    },
    "environment": {"train_tasks": "rows.jsonl"},
}


def test_the_switch_of_nemo_rl_is_the_environment_kind_nemo_gym() -> None:
    before = copy.deepcopy(THEIRS)
    environment = parse_config(THEIRS).environment
    assert isinstance(environment, NemoGymEnvironment)
    assert environment.config_paths == ("math.yaml", "agent.yaml")
    assert environment.overrides == ("++port_range_low=9000",)
    assert environment.train_tasks == "rows.jsonl"
    assert before == THEIRS, "what was given is as it was"


def test_megatrons_generation_in_the_trainer_is_refused_with_what_there_is_here() -> None:
    policy = {"model_name": "m", "megatron_cfg": {"enabled": True}, "generation": {"backend": "megatron"}}
    with pytest.raises(ConfigError, match=r"policy\.megatron_cfg is given, which needs megatron-core.*backend trainer"):
        parse_config({"run_id": "r", "policy": policy})


def test_what_the_policy_of_nemo_rl_says_of_generation_acts_as_in_the_section() -> None:
    """It was read for its two switches, and the rest of it was dropped without a word."""
    tree = copy.deepcopy(THEIRS)
    tree["policy"]["model_name"] = "/models/m"
    tree["policy"]["generation"] |= {"max_new_tokens": 512, "temperature": 0.7, "top_p": 1.0, "top_k": None}
    tree["policy"]["generation"]["vllm_cfg"] |= {
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.8,
        "precision": "bfloat16",
        "tensor_parallel_size": 4,
    }
    config = parse_config(tree)
    assert (config.policy.kind, config.policy.path) == ("pretrained", "/models/m")
    generation = config.generation
    assert (generation.sampling.max_new_tokens, generation.sampling.temperature) == (512, 0.7)
    assert (generation.max_model_len, generation.gpu_memory_utilization, generation.dtype) == (4096, 0.8, "bfloat16")
    assert generation.engine_args == {"tensor_parallel_size": 4}
    del tree["env"], tree["environment"], tree["policy"]["generation"]["vllm_cfg"]
    tree["policy"]["generation"]["max_new_tokens"] = 100
    assert parse_config(tree).generation.sampling.temperature == 0.7, "also without Gym"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": {"generation": {"max_tokens": 5}}}, r"generation\.max_tokens: unknown key"),
        (
            {"policy": {"generation": {"vllm_cfg": {"use_deep_gemm": True}}}},
            r"vllm_cfg\.use_deep_gemm is true, which is not",
        ),
        (
            {"policy": {"generation": {"vllm_cfg": {"async_engine": False}}}},
            r"async_engine is not true, but it always is",
        ),
        (
            {"policy": {"generation": {"backend": "vllm"}}, "generation": {"backend": "hf"}},
            "both say backend. Say it in generation alone",
        ),
        ({"policy": {"model_name": "m", "kind": "warm_start"}}, r"policy.*model_name: unknown key"),
    ],
)
def test_what_it_says_that_is_not_carried_out_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"run_id": "r"} | changes)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("policy.generation.vllm_cfg.async_engine", False, r"policy\.generation\.vllm_cfg\.async_engine is not true"),
        ("policy.generation.vllm_cfg.expose_http_server", None, r"vllm_cfg\.expose_http_server is not true"),
        ("env.should_use_nemo_gym", False, r"env\.should_use_nemo_gym is not true"),
        ("env.nemo_gym", {}, r"env\.nemo_gym\.config_paths is unset"),
        ("env.nemo_gym.math", {"a": 1}, r"env\.nemo_gym\.math is a section"),
        ("env.math", {}, "env has other keys"),
        (
            "environment.kind",
            "calculator",
            r"should_use_nemo_gym is true, and environment\.kind is calculator.*mixture",
        ),
    ],
)
def test_each_switch_that_is_off_is_refused_by_its_key(place: str, value: Any, said: str) -> None:
    tree = copy.deepcopy(THEIRS)
    *parents, leaf = place.split(".")
    section = tree
    for parent in parents:
        section = section[parent]
    section[leaf] = value
    with pytest.raises(ConfigError, match=said):
        parse_config(tree)


def test_the_flat_names_of_generation_are_those_of_sampling_and_both_are_refused() -> None:
    flat = {
        "backend": "hf",
        "max_new_tokens": 100,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": None,
        "model_name": "/models/m",
    }
    config = parse_config({"run_id": "r", "generation": flat})
    sampling = config.generation.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (100, 0.7, 1.0, None)
    assert (config.generation.backend, config.policy.kind, config.policy.path) == (
        "transformers",
        "pretrained",
        "/models/m",
    )
    for generation, told in (
        ({"temperature": 0.7, "sampling": {"temperature": 1.0}}, "Give generation.sampling.temperature alone"),
        ({"model_name": "m"}, "Name the model in policy alone"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_config({"run_id": "r", "generation": generation, "policy": {"kind": "warm_start"}})
