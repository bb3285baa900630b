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


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("policy.generation.vllm_cfg.async_engine", False, r"policy\.generation\.vllm_cfg\.async_engine is not true"),
        ("policy.generation.vllm_cfg.expose_http_server", None, r"vllm_cfg\.expose_http_server is not true"),
        ("env.should_use_nemo_gym", False, r"env\.should_use_nemo_gym is not true"),
        ("env.nemo_gym", {}, r"env\.nemo_gym\.config_paths is unset"),
        ("env.nemo_gym.math", {"a": 1}, r"env\.nemo_gym\.math is a section"),
        ("env.math", {}, "env has other keys"),
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
