"""Every key of `train` besides its algorithm changes the result or the way of a step; `train.service` sets its place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from roundhouse.config.loading import parse_config
from roundhouse.config.models import TrainConfig
from roundhouse.errors import InfraError
from roundhouse.stages.trainers import open_service
from roundhouse.training.algorithms import build_algorithm
from roundhouse.training.service import actor, client
from roundhouse.training.trainer import Trainer
from tests.training.test_every_algorithm_key import loss_of_algorithm
from tests.training.tiny import make_model, sequences

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("start") / "v0")


@pytest.fixture
def trained(start: Path, tmp_path: Path) -> Callable[[Tree], tuple[str, dict[str, float]]]:
    """Digest of the weights after two iterations, and the last one's metrics."""

    def train(tree: Tree) -> tuple[str, dict[str, float]]:
        settings = {"device": "cpu", "threads": 1, "minibatches": 2} | tree
        trainer = Trainer.load(start, TrainConfig.model_validate(settings))
        for iteration in (1, 2):
            report = trainer.step(sequences(seed=iteration), iteration)
        directory = tmp_path / hashlib.sha256(repr(tree).encode()).hexdigest()
        trainer.save(directory)
        return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(), dict(report.metrics)

    return train


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        ({}, {"epochs": 2}),
        ({}, {"optimizer": {"betas": [0.5, 0.6]}}),
        ({}, {"optimizer": {"eps": 0.1}}),
        ({}, {"optimizer": {"weight_decay": 0.5}}),
        ({}, {"optimizer": {"max_grad_norm": 0.01}}),
        ({}, {"lora": {}}),
        ({"lora": {}}, {"lora": {"rank": 4}}),
        ({"lora": {}}, {"lora": {"alpha": 4.0}}),
        ({"lora": {}}, {"lora": {"target_modules": ["q_proj"]}}),
    ],
    ids=["epochs", "betas", "eps", "weight_decay", "max_grad_norm", "lora", "rank", "alpha", "target_modules"],
)
def test_a_key_changes_the_weights(trained: Callable[[Tree], Any], plain: Tree, changed: Tree) -> None:
    assert trained(changed)[0] != trained(plain)[0]


@pytest.mark.parametrize(
    ("changed", "metric"),
    [({"tokens_per_microbatch": 64}, "num_microbatches"), ({"packing": False}, "packing_efficiency")],
    ids=["tokens_per_microbatch", "packing"],
)
def test_a_key_changes_how_a_step_is_computed(trained: Callable[[Tree], Any], changed: Tree, metric: str) -> None:
    assert trained(changed)[1][metric] != trained({})[1][metric]


def test_the_threads_of_a_trainer_are_those_that_it_is_given(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    trainer = Trainer.load(start, TrainConfig(device="cpu", threads=2))
    given.clear()
    trainer.step(sequences(), 1)
    assert 2 in given


# The algorithm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "dapo"},
        {"kind": "dr_grpo"},
        {"kind": "gdpo"},
        {"kind": "ppo"},
        {"kind": "custom", "target": "tests.training.test_every_algorithm_key:Scaled"},
    ],
    ids=lambda tree: tree["kind"],
)
def test_a_run_learns_by_the_algorithm_that_it_names(algorithm: Tree) -> None:
    def loss(tree: Tree) -> float:
        return loss_of_algorithm(build_algorithm(parse_config({"run_id": "r", "train": tree}).train.algorithm))

    assert loss({"algorithm": algorithm}) != loss({})


# Where it runs ----------------------------------------------------------------------------------------------------------


def opened(service: Tree) -> None:
    open_service(TrainConfig.model_validate({"service": service}), owner="r", temperature=1.0)


@pytest.mark.parametrize(
    ("key", "value", "handed", "expected"),
    [
        ("url", "http://there:1", None, "http://there:1"),
        ("token_variable", "OTHER_TOKEN", "token", "of-the-other-variable"),
        ("token_file", "token.txt", "token", "of-the-file"),
        ("timeout_seconds", 77.0, "timeout_seconds", 77.0),
        ("retry_seconds", 77.0, "retry_seconds", 77.0),
    ],
)
def test_a_remote_service_is_reached_as_its_section_says(
    key: str, value: Any, handed: str | None, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token.txt").write_text("of-the-file\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTHER_TOKEN", "of-the-other-variable")
    made = mock.Mock()
    monkeypatch.setattr(client, "RemoteTrainService", made)
    opened({"kind": "remote", "url": "http://here:1", key: value})
    [call] = made.mock_calls
    assert (call.args[0] if handed is None else call.kwargs[handed]) == expected


def test_an_actor_is_asked_of_the_cluster_that_the_section_names(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = mock.MagicMock()
    ray.is_initialized.return_value = False
    ray.get.side_effect = actor.GetTimeoutError
    monkeypatch.setattr(actor, "ray", ray)
    service = {"kind": "ray", "address": "ray://there:1", "cpus": 7.0, "timeout_seconds": 77.0}
    train = open_service(TrainConfig.model_validate({"service": service}), owner="r", temperature=1.0)
    assert ray.init.call_args.kwargs["address"] == "ray://there:1"
    assert ray.remote.return_value.options.call_args.kwargs["num_cpus"] == 7.0
    with pytest.raises(InfraError, match="77 s"):
        train.facts()
