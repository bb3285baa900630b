"""Trainers in NexRL's form are algorithms of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundhouse.config.training import TrainConfig
from roundhouse.errors import ConfigError, DataError
from roundhouse.training.algorithms import TokenSignals, build_algorithm
from roundhouse.training.batch import TrainingSequences
from tests.training.tiny import records

TRAINERS = """
import torch
from nexrl.trainer import RemoteApiTrainer, SelfHostedGrpoTrainer, SelfHostedTrainer
from nexrl.nexrl_types import Batch, Trajectory

class MyCustomTrainer(SelfHostedTrainer):
    def _prepare_batch(self, batch: Batch):
        values = batch.values
        assert values["input_ids"].shape == values["attention_mask"].shape == values["position_ids"].shape
        assert values["prompts"].shape[1] + values["responses"].shape[1] == values["input_ids"].shape[1]
        steps = (values["responses"] != 0).float()
        values["advantages"] = steps * (2 * self._parameters["factor"] * values["reward_column"][:, None] - 1)
        return batch, {"custom/mean": 1.0}

    def _process_trajectories(self, trajectories):
        import torch
        processed = super()._process_trajectories(trajectories)
        return [each | {"reward_column": torch.tensor(each["reward"])} for each in processed]

class MyRemoteTrainer(RemoteApiTrainer):
    def _prepare_trajectories(self, trajectories, metrics):
        for trajectory in trajectories:
            trajectory["advantages"] = 2 * trajectory["reward"] - 1
        metrics["custom"] = len(trajectories)
        return trajectories

class Halved(SelfHostedGrpoTrainer):
    def _reward_fn(self, batch):
        scores = super()._reward_fn(batch)
        assert scores.shape == batch.values["responses"].shape
        assert scores.sum(-1).tolist() == batch.values["reward"]
        assert not scores[batch.values["loss_mask"][:, -scores.shape[1]:] == 0].any()
        return torch.where(scores > 0.5, 1.0, 0.0).double()

    def _compute_data_metrics(self, batch):
        assert len(batch.values["advantages"]) == len(batch)
        return {"mine": 1.0}

class Penalized(SelfHostedGrpoTrainer):
    def _apply_kl_penalty(self, batch, kl_ctrl, kl_penalty):
        return batch, {}

class Forgetful(RemoteApiTrainer):
    def _prepare_trajectories(self, trajectories, metrics):
        return trajectories[1:]

class Silent(RemoteApiTrainer):
    def _prepare_trajectories(self, trajectories, metrics):
        return trajectories
"""


def computed(target: str, **parameters: Any) -> tuple[TrainingSequences, TokenSignals]:
    section = {"kind": "custom", "target": target, "parameters": parameters}
    config = TrainConfig.model_validate({"algorithm": section, "threads": 1})
    sequences = TrainingSequences.from_records(records())
    return sequences, build_algorithm(config.algorithm).compute(sequences)


@pytest.fixture
def trainers(tmp_path: Path) -> str:
    (tmp_path / "my_trainer.py").write_text(TRAINERS)
    return str(tmp_path / "my_trainer.py")


@pytest.mark.parametrize(("name", "parameters"), [("MyCustomTrainer", {"factor": 1.0}), ("MyRemoteTrainer", {})])
def test_the_advantages_of_both_hooks_are_trained_on_where_the_policy_generated(
    trainers: str, name: str, parameters: dict[str, Any]
) -> None:
    sequences, signals = computed(f"{trainers}:{name}", **parameters)
    rewards = np.repeat(sequences.rewards, sequences.lengths)
    weights = signals.columns.policy_weights
    assert weights.any()
    trained = (weights > 0) & (sequences.token_ids != 0)
    expected = 2 * rewards - 1
    np.testing.assert_allclose(signals.columns.advantages[trained], expected[trained], rtol=1e-6)
    assert not signals.columns.advantages[~sequences.loss_mask].any()


def test_nexrls_grpo_is_the_runs_but_for_its_epsilon() -> None:
    sequences, ours = computed_grpo()
    for name in ("SelfHostedGrpoTrainer", "RemoteApiGrpoTrainer"):
        _, theirs = computed(f"roundhouse.plugins.nexrl.trainers:{name}")
        np.testing.assert_allclose(theirs.columns.advantages, ours.columns.advantages, rtol=1e-4, atol=1e-5)
    assert len(sequences)


def test_a_hook_of_nexrls_grpo_has_its_effect_and_one_that_is_not_called_is_refused(trainers: str) -> None:
    sequences, signals = computed(f"{trainers}:Halved")
    _, plain = computed("roundhouse.plugins.nexrl.trainers:SelfHostedGrpoTrainer")
    differs = signals.columns.advantages != plain.columns.advantages
    halves = {group for group, reward in zip(sequences.group_ids, sequences.rewards, strict=True) if reward == 0.5}
    assert halves, "only the groups with a reward of a half have other advantages"
    assert {sequences.group_ids[place] for place in sequences.sequence_of_token[differs]} == halves
    with pytest.raises(ConfigError, match=r"Penalized defines _apply_kl_penalty, which is not called.*kl_placement"):
        computed(f"{trainers}:Penalized")


def computed_grpo() -> tuple[TrainingSequences, TokenSignals]:
    sequences = TrainingSequences.from_records(records())
    return sequences, build_algorithm(TrainConfig().algorithm).compute(sequences)


def test_trajectories_that_are_left_out_and_advantages_that_are_missing_are_named(trainers: str) -> None:
    with pytest.raises(DataError, match=r"Forgetful\._prepare_trajectories left out or moved trajectories"):
        computed(f"{trainers}:Forgetful")
    with pytest.raises(DataError, match="Silent wrote no advantages"):
        computed(f"{trainers}:Silent")
