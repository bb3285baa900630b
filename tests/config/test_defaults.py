"""Defaults that follow from the policy: learning rates, their reasons, and the defaults that recorded runs keep."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.config.defaults import rate_notes
from roundhouse.config.loading import digest_of_tree, parse_config
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.store.run import open_run

PRETRAINED = {"policy": {"kind": "pretrained", "path": "/models/chat"}}
PPO = {"kind": "ppo", "critic": {"optimizer": {"warmup_steps": 3}}}
TINKER = {"service": {"kind": "tinker", "base_model": "Qwen/Qwen3-8B"}}


@pytest.mark.parametrize(
    ("policy", "train", "rate", "reason"),
    [
        ({}, {}, 3e-4, "the run makes a small policy itself"),
        (PRETRAINED, {}, 1e-6, "all weights of a pretrained policy"),
        ({"policy": {"kind": "bundled", "name": "smollm2-135m-instruct"}}, {}, 1e-6, "all weights of a pretrained"),
        (PRETRAINED, {"lora": {}}, 1e-5, "an adapter of a pretrained policy"),
        (PRETRAINED, TINKER, 1e-5, "an adapter of a pretrained policy"),
    ],
)
def test_a_learning_rate_that_is_not_set_fits_the_policy(
    policy: dict[str, Any], train: dict[str, Any], rate: float, reason: str
) -> None:
    generation = {"generation": {"backend": "tinker"}} if "service" in train else {}
    tree = {"run_id": "r", "train": train} | policy | generation
    config = parse_config(tree)
    assert config.train.optimizer.learning_rate == rate
    [note] = rate_notes(config)
    assert f"train.optimizer.learning_rate is {rate:g}, by default: {reason}" in note
    chosen = parse_config(tree | {"train": train | {"optimizer": {"learning_rate": 7e-5}}})
    assert chosen.train.optimizer.learning_rate == 7e-5
    assert rate_notes(chosen) == []


@pytest.mark.parametrize(("policy", "rate"), [({}, 1e-3), (PRETRAINED, 1e-5)])
def test_a_critics_learning_rate_that_is_not_set_fits_the_policy(policy: dict[str, Any], rate: float) -> None:
    config = parse_config({"run_id": "r", "train": {"algorithm": PPO}} | policy)
    assert config.train.algorithm.critic_section is not None
    assert config.train.algorithm.critic_section.optimizer.learning_rate == rate
    assert any(f"critic.optimizer.learning_rate is {rate:g}" in note for note in rate_notes(config))


def test_a_dry_run_shows_the_learning_rate_and_its_reason(tmp_path: Any) -> None:
    (tmp_path / "run.yaml").write_text(f"run_id: r\nstore: {tmp_path}/store\n")
    shown = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--dry-run"])
    assert "# train.optimizer.learning_rate is 0.0003, by default: the run makes a small policy" in shown.stdout


def recorded_with_former_defaults(tree: dict[str, Any]) -> RunConfig:
    """Create the run of a configuration as an earlier version recorded it; return the configuration as it is today."""
    config = parse_config(tree)
    run = open_run(config)
    identity = json.loads(run.location.read("run.json"))
    train = identity["config"]["train"]
    train["optimizer"]["learning_rate"] = 3e-4
    train["algorithm"]["critic"]["optimizer"]["learning_rate"] = 1e-3
    train["algorithm"]["mismatch_correction"] = "none"
    train["algorithm"]["reward"]["overlong"]["penalty"] = 1.0
    train["packing"] = True
    identity["config"]["generation"]["tool_call_parser"] = "hermes"
    identity["config_digest"] = digest_of_tree(identity["config"])
    del identity["identity_digest"]
    run.location.write("run.json", json.dumps(identity).encode())
    return config


def test_a_recorded_run_keeps_the_defaults_that_it_began_with(store_uri: str) -> None:
    ppo = PPO | {"reward": {"overlong": {"max_generated_tokens": 500}}}
    tree = PRETRAINED | {"run_id": "r", "store": store_uri, "train": {"algorithm": ppo}}
    config = recorded_with_former_defaults(tree)
    train = open_run(config).config.train
    assert train.packing is True
    assert train.optimizer.learning_rate == 3e-4
    assert train.algorithm.mismatch_correction == "none"
    assert train.algorithm.critic_section.optimizer.learning_rate == 1e-3
    assert train.algorithm.reward.overlong_penalty == 1.0
    assert open_run(config).config.generation.tool_call_parser == "hermes"
    assert [note.rpartition(": ")[2] for note in rate_notes(open_run(config).config)] == [
        "the default when the run began"
    ] * 2
    for key, value in {
        "optimizer": {"learning_rate": 1e-6},
        "algorithm": ppo | {"mismatch_correction": "auto"},
    }.items():
        changed = parse_config(tree | {"train": tree["train"] | {key: value}})
        with pytest.raises(ConfigError, match=rf"train\.{key}.*->"):
            open_run(changed)
