"""Every key of `train.algorithm` changes the loss of one fixed batch, for every algorithm that takes it."""

from __future__ import annotations

import functools
import typing
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.algorithms import AlgorithmConfig, TokenLoss
from roundhouse.config.kinds import Kinds
from roundhouse.training.algorithms import Algorithm, AlgorithmInputs, build_algorithm
from roundhouse.training.algorithms.policy_gradient import Groups, PolicyGradientAlgorithm, Rewards
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.loss import LossTokens, MetricSums, sequence_scale, token_loss
from tools.ignore_keys import has_one_value

SECTIONS: tuple[type[TokenLoss], ...] = tuple(Kinds("algorithm").sections())  # type: ignore[arg-type]
REQUIRED: dict[str, dict[str, Any]] = {
    "distillation": {"teacher": "/teacher"},
    "custom": {"target": "tests.training.test_every_algorithm_key:Scaled"},
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss_aggregation": ({}, {"loss_aggregation": "rollout"}),
    "fixed_length": ({"loss_aggregation": "fixed_length", "fixed_length": 512}, {"fixed_length": 7}),
    "kl_coefficient": ({}, {"kl_coefficient": 0.5}),
    "kl_estimator": ({"kl_coefficient": 0.5, "kl_placement": "loss"}, {"kl_estimator": "k2"}),
    "kl_placement": (
        {"kl_coefficient": 0.5, "kl_estimator": "k1", "kl_placement": "loss"},
        {"kl_placement": "reward"},
    ),
    "kl_importance_weighting": ({"kl_coefficient": 0.5, "kl_placement": "loss"}, {"kl_importance_weighting": True}),
    "entropy_coefficient": ({}, {"entropy_coefficient": 0.5}),
    "policy_loss": ({}, {"policy_loss": "reinforce"}),
    "importance_ratio": ({}, {"importance_ratio": "on_policy"}),
    "clip_low": ({}, {"clip_low": 0.4}),
    "clip_high": ({}, {"clip_high": 0.01}),
    "dual_clip": ({}, {"dual_clip": 1.01}),
    "advantage_clip": ({}, {"advantage_clip": [-0.1, 0.1]}),
    "positive_nll_weight": ({}, {"positive_nll_weight": 0.5}),
    "mask_truncated": ({"mask_truncated": False}, {"mask_truncated": True}),
    "reward": ({}, {"reward": {"truncated_factor": 0.0}}),
    "environments": ({}, {"environments": {"g0": {"advantage_clip": [-0.1, 0.1]}}}),
    "mismatch_correction": ({"mismatch_correction": "none"}, {"mismatch_correction": "tis"}),
    "mismatch_bounds": ({"mismatch_correction": "tis"}, {"mismatch_bounds": [0.0, 1.01]}),
    "max_sequence_error": ({}, {"max_sequence_error": 1.2}),
    "normalize_by_std": ({}, {"normalize_by_std": False}),
    "leave_one_out": ({"normalize_by_std": False}, {"leave_one_out": True}),
    "turn_discount": ({}, {"turn_discount": 0.5}),
    "minus_baseline": ({}, {"minus_baseline": False}),
    "normalize_batch": ({}, {"normalize_batch": False}),
    "gamma": ({}, {"gamma": 0.5}),
    "gae_lambda": ({}, {"gae_lambda": 0.5}),
    "whiten_advantages": ({}, {"whiten_advantages": False}),
    "weights": ({}, {"weights": {"a": 3.0, "b": 1.0}}),
    "select": ({}, {"select": "best_of_group"}),
    "reward_threshold": ({"select": "threshold", "reward_threshold": 0.1}, {"reward_threshold": 0.9}),
    "include_truncated": ({}, {"include_truncated": True}),
    "parameters": ({}, {"parameters": {"factor": 3.0}}),
}
"""Of each key, what goes with it, and the change."""


class Scaled(PolicyGradientAlgorithm):
    """A user's algorithm: distances from the group's mean, multiplied."""

    def __init__(self, config: Any, factor: float = 2.0) -> None:
        super().__init__(config)
        self._factor = factor

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        found: np.ndarray = self._factor * (rewards.values - groups.of_sequences(groups.means))
        return found


def section_of(tree: dict[str, Any]) -> TokenLoss:
    found: TokenLoss = TypeAdapter(AlgorithmConfig).validate_python(tree)
    return found


def loss_of(tree: dict[str, Any]) -> float:
    """The loss of an update by the algorithm of a section."""
    return loss_of_algorithm(build_algorithm(section_of(tree)))


@functools.cache
def fixed_batch() -> tuple[TrainingSequences, AlgorithmInputs, np.ndarray]:
    """Three groups with rewards, lengths, truncation and log-probabilities of all kinds; the last are the current ones."""
    random = np.random.default_rng(7)
    rewards = [0.9, 0.1, 0.4, 0.2, 1.0, 0.0, 0.3, 0.3, 0.8]
    rows = []
    for number, reward in enumerate(rewards):
        tokens = 3 + 2 * (number % 4)
        rows.append(
            {
                "sequence_id": f"s{number}",
                "rollout_id": f"r{number - (number == 8)}",
                "group_id": f"g{number // 3}",
                "token_ids": [1] * (1 + tokens),
                "loss_mask": [0] + [1] * tokens,
                "gen_logprobs": [0.0, *random.uniform(-3, -0.1, tokens).tolist()],
                "policy_version": 0,
                "reward": reward,
                "reward_components": {"a": reward, "b": float(random.uniform())},
                "truncated": number % 5 == 0,
                "turn_rewards": [{"end": 3, "reward": float(number % 2)}],
            }
        )
    sequences = TrainingSequences.from_records(rows)
    count = len(sequences.token_ids)
    old, cur, reference = (sequences.gen_logprobs + random.normal(0, 0.3, count).astype(np.float32) for _ in range(3))
    values, final = random.uniform(0, 1, count) * sequences.loss_mask, random.uniform(0, 1, len(rows))
    return sequences, AlgorithmInputs(old=old, reference=reference, values=values, final_values=final), cur


def loss_of_algorithm(algorithm: Algorithm) -> float:
    """The loss of an update on the fixed batch."""
    sequences, inputs, cur = fixed_batch()
    columns, settings = algorithm.compute(sequences, inputs).columns, algorithm.loss
    trained = columns.trained
    owner = torch.from_numpy(np.asarray(sequences.sequence_of_token)[trained].astype(np.int64))
    kept, number, lengths = torch.unique(owner, return_inverse=True, return_counts=True)
    rollouts = torch.tensor([int(sequences.rollout_ids[index][1:]) for index in kept])
    scale = sequence_scale(lengths, settings.aggregation, rollouts=rollouts, fixed_length=settings.fixed_length)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.float32)[trained])

    tokens = LossTokens(
        cur=tensor(cur),
        old=tensor(inputs.old),
        gen=tensor(sequences.gen_logprobs),
        advantages=tensor(columns.advantages),
        policy_weights=tensor(columns.policy_weights),
        scale=scale[number],
        ref=tensor(inputs.reference),
        kl_weights=tensor(columns.reference_kl_weights),
        entropy=-tensor(cur),
        entropy_weights=tensor(columns.entropy_weights),
        cross_entropy_weights=tensor(columns.cross_entropy_weights),
        sequence=owner,
    )
    return float(token_loss(tokens, settings, MetricSums())[0])


def basic(section: type[TokenLoss]) -> dict[str, Any]:
    [kind] = typing.get_args(section.model_fields["kind"].annotation)
    return {"kind": kind} | REQUIRED.get(kind, {})


ELSEWHERE = {"kind", "adaptive_kl", "teacher", "target", "reference_every", "critic"}
"""Keys that act over several iterations or files; tests of the stages and of PPO show them."""


def test_every_key_is_changed_below() -> None:
    keys = {key for section in SECTIONS for key in section.model_fields if not has_one_value(section, key)}
    assert keys - ELSEWHERE == CHANGES.keys()


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_changes_the_loss_of_every_algorithm_or_is_refused(key: str) -> None:
    beside, change = CHANGES[key]
    changed = []
    for section in SECTIONS:
        if key not in section.model_fields or has_one_value(section, key):
            continue
        before, after = basic(section) | beside, basic(section) | beside | change
        try:
            section_of(after)
        except ValidationError:
            continue
        assert loss_of(before) != loss_of(after), section.__name__
        changed.append(section)
    assert changed
