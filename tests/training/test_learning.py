"""The whole loop on a task small enough to watch: sample from the policy, reward, train, and the reward rises."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning_curves import train
from roundhouse.config.algorithms import GRPOConfig
from roundhouse.config.loading import load_config
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.config.training import WarmStartPolicy
from roundhouse.environments import load
from roundhouse.policy.warm_start import make_starting_policy
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from tests.training.tiny import make_model, plain_model

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PROMPTS, GROUP, ANSWER = 8, 8, 2
NUMBERS = [10, 11, 20, 21]


def parity_rollouts(policy: Any, iteration: int) -> list[dict[str, Any]]:
    """Each task names a number; the two tokens sampled after it should have its parity. Chance level is 0.5."""
    rng = random.Random(iteration)
    torch.manual_seed(iteration)
    prompts = [[0, rng.choice(NUMBERS)] for _ in range(PROMPTS)]
    tokens = torch.tensor([prompt for prompt in prompts for _ in range(GROUP)])
    log_probs = []
    with torch.no_grad():
        for _ in range(ANSWER):
            distribution = torch.log_softmax(policy(input_ids=tokens).logits[:, -1], -1)
            drawn = torch.multinomial(distribution.exp(), 1)
            log_probs.append(distribution.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], dim=1)
    rows = []
    for i, (ids, values) in enumerate(zip(tokens.tolist(), torch.cat(log_probs, 1).tolist(), strict=True)):
        reward = sum(answer % 2 == ids[1] % 2 for answer in ids[2:]) / ANSWER
        rows.append(
            {
                "sequence_id": f"{iteration}/{i}",
                "rollout_id": f"{iteration}/{i}",
                "group_id": f"{iteration}/{i // GROUP}",
                "token_ids": ids,
                "loss_mask": [0, 0, 1, 1],
                "gen_logprobs": [0.0, 0.0, *values],
                "policy_version": iteration - 1,
                "reward": reward,
            }
        )
    return rows


@pytest.mark.parametrize(
    "grpo", [GRPOConfig(), GRPOConfig(leave_one_out=True, normalize_by_std=False)], ids=["grpo", "rloo"]
)
def test_the_reward_of_a_parity_task_rises_from_chance_to_mastery(tmp_path: Path, grpo: GRPOConfig) -> None:
    config = TrainConfig(
        algorithm=grpo,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=4),
        minibatches=4,
        threads=1,
        device="cpu",
    )
    directory = make_model(tmp_path / "policy")
    trainer = Trainer.load(directory, config)
    sampler = plain_model(directory)  # transformers' own attention, so that the mismatch metric means something
    rewards = []
    for iteration in range(1, 31):
        sampler.load_state_dict(trainer.model.state_dict())
        report = trainer.step(TrainingSequences.from_records(parity_rollouts(sampler, iteration)), iteration)
        rewards.append(report.metrics["reward"])
        assert report.metrics["logprob_abs_diff_max"] < 1e-4
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert first < 0.65
    assert last > 0.85, rewards


@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_tools_in_six_turns_are_learnt_by_a_tiny_policy(tmp_path: Path) -> None:
    """configs/horizon.yaml, cut down: fewer goods, a smaller policy, a shorter warm start, ten iterations."""
    cut_down = {
        "environment.most": 2,
        "policy.hidden_size": 64,
        "policy.layers": 2,
        "policy.heads": 2,
        "policy.intermediate_size": 192,
        "policy.steps": 240,
        "policy.batch_size": 16,
        "rollout.prompts_per_iteration": 8,
        "train.optimizer.learning_rate": 8.0e-4,
        "train.threads": 1,
        "evaluation.tasks": 80,
    }
    config = load_config(ROOT / "configs/horizon.yaml", [f"{key}={value}" for key, value in cut_down.items()])
    assert isinstance(config.policy, WarmStartPolicy)
    make_starting_policy(config.policy, load(config.environment), 0, tmp_path / "start")
    run = asyncio.run(train(config, tmp_path / "start", 10, tmp_path / "last"))
    before, after = run["sampled_before"], run["sampled_after"]
    assert before[0] < 0.5
    assert after[0] > before[0] + 3 * math.hypot(before[1], after[1]), run
