"""A rollout with a tree of calls: each call is trained once, on any number of paths, and the rollout counts once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.config.models import OptimizerConfig, TrainConfig, ValidationConfig
from roundhouse.rollout.conversation import TurnChain
from roundhouse.training.algorithms.built_in import GroupRelative
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.trainer import Trainer
from roundhouse.trajectories.records import Rollout, Turn
from roundhouse.trajectories.schemas import rebuild_prompts
from roundhouse.trajectories.validation import validate
from tests.training import reference
from tests.training.tiny import VOCABULARY, plain_model
from tests.trajectories.rollouts import rollout

BETA = 0.9


def tree(seed: int) -> list[Turn]:
    """A main conversation that asks a sub-agent (call 1), returns (call 2), is answered once more from there (call 3), and ends
    in two branches (calls 4 and 5) that share all of calls 0 and 2."""
    rng, chain = random.Random(seed), TurnChain()

    def some(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def call(prompt: list[int]) -> list[int]:
        said = some(rng.randint(2, 7))
        chain.add(prompt, said, [-rng.uniform(0.5, 6) for _ in said], policy_version=0, finish_reason="stop")
        return prompt + said

    main = call(some(20))
    call(some(9))
    main = call(main + some(4))
    other = call(main + some(3))
    call(main + some(5))
    call(other + some(2))
    return chain.turns


def group() -> list[Rollout]:
    """Two rollouts with trees, two of one call."""
    rollouts = []
    for sample, reward in enumerate((1.0, 0.0, 0.5, 0.0)):
        each = rollout(sample=sample, reward=reward)
        each.turns = tree(sample) if sample < 2 else tree(sample)[:1]
        rollouts.append(each)
    return rollouts


def paths_of(rollouts: list[Rollout]) -> TrainingSequences:
    result = validate(rollouts, ValidationConfig(), vocabulary_size=VOCABULARY, policy_version=0)
    assert result.reasons == {}
    return TrainingSequences.from_table(result.sequences)


def calls_of(rollouts: list[Rollout]) -> list[dict[str, Any]]:
    """Return each call alone: its whole prompt, masked, and its generated tokens."""
    rows = []
    for each in rollouts:
        for turn, prompt in zip(each.turns, rebuild_prompts(each.turns), strict=True):
            said = turn.generation_token_ids
            rows.append(
                {
                    "sequence_id": f"{each.rollout_id}/call {turn.turn}",
                    "rollout_id": each.rollout_id,
                    "group_id": each.group_id,
                    "token_ids": prompt + said,
                    "loss_mask": [0] * len(prompt) + [1] * len(said),
                    "gen_logprobs": [0.0] * len(prompt) + turn.generation_log_probs,
                    "reward": each.reward,
                }
            )
    return rows


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_paths_with_shared_calls_have_the_gradient_of_each_call_masked_by_hand(model_dir: Path, packing: bool) -> None:
    rollouts, model = group(), plain_model(model_dir)
    rows = calls_of(rollouts)
    loss = reference.loss(model, rows, reference.advantages(rows, normalize=True, leave_one_out=False))
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer = OptimizerConfig(learning_rate=1e-3, betas=(BETA, 0.95), warmup_steps=0, max_grad_norm=1e9)
    config = TrainConfig(
        algorithm=GRPOConfig(mismatch_correction="none"),
        optimizer=optimizer,
        minibatches=1,
        threads=1,
        device="cpu",
        packing=packing,
    )
    trainer = Trainer.load(model_dir, config)
    report = trainer.step(paths_of(rollouts), 1)
    state = trainer.engine.optimizer.state
    found = torch.cat([(state[p]["exp_avg"] / (1 - BETA)).flatten() for p in trainer.model.parameters()])
    assert float((found - expected).norm() / expected.norm()) < 2e-6
    assert report.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
    said = sum(len(turn.generation_token_ids) for each in rollouts for turn in each.turns)
    assert report.tokens["trained"] == said
    assert (report.metrics["num_rollouts"], report.metrics["num_sequences"]) == (4, 8)


def test_a_rollout_counts_once_in_its_groups_baseline_however_many_paths_it_has() -> None:
    rollouts = group()
    batch = paths_of(rollouts)
    assert [batch.rollout_ids.count(each.rollout_id) for each in rollouts] == [3, 3, 1, 1]
    signals = GroupRelative(GRPOConfig(normalize_by_std=False)).compute(batch)
    assert signals.sequence_columns["baseline"].tolist() == [(1.0 + 0.0 + 0.5 + 0.0) / 4] * 8
    for name, expected in zip(("g/0", "g/1", "g/2", "g/3"), (0.625, -0.375, 0.125, -0.375), strict=True):
        own = np.array([each == name for each in batch.rollout_ids])
        assert np.unique(signals.columns.advantages[np.repeat(own, batch.lengths) & batch.loss_mask]) == pytest.approx(
            [expected]
        )
