"""Every key of `train.algorithm` changes the loss of one fixed batch, or has one value."""

from __future__ import annotations

import typing
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError

from roundhouse.config.algorithms import AlgorithmConfig, TokenLoss
from roundhouse.errors import DataError
from roundhouse.training.algorithms import Algorithm, AlgorithmInputs, build_algorithm
from roundhouse.training.algorithms.policy_gradient import Groups, PolicyGradientAlgorithm, Rewards, next_coefficient
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.loss import LossTokens, MetricSums, sequence_scale, token_loss

SECTIONS: tuple[type[TokenLoss], ...] = typing.get_args(typing.get_args(AlgorithmConfig)[0])
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
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RewardShaping.scaling": ({}, {"scaling": {"target": [-2.0, 2.0]}}),
    "RewardShaping.truncated_factor": ({}, {"truncated_factor": 0.5}),
    "RewardShaping.overlong": ({}, {"overlong": {"max_generated_tokens": 4, "buffer_tokens": 2}}),
    "Scaling.source": ({"scaling": {}}, {"scaling": {"source": [0.0, 2.0], "target": [-1.0, 2.0]}}),
    "Scaling.target": ({"scaling": {}}, {"scaling": {"target": [-2.0, 2.0]}}),
    "OverlongShaping.max_generated_tokens": (
        {"overlong": {"max_generated_tokens": 90, "buffer_tokens": 2}},
        {"overlong": {"max_generated_tokens": 4, "buffer_tokens": 2}},
    ),
    "OverlongShaping.buffer_tokens": (
        {"overlong": {"max_generated_tokens": 128}},
        {"overlong": {"max_generated_tokens": 128, "buffer_tokens": 4}},
    ),
    "OverlongShaping.penalty": (
        {"overlong": {"max_generated_tokens": 4, "buffer_tokens": 2}},
        {"overlong": {"max_generated_tokens": 4, "buffer_tokens": 2, "penalty": 9.0}},
    ),
}


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


def loss_of_algorithm(algorithm: Algorithm) -> float:
    """The loss of an update on three groups: rewards, lengths, truncation and log-probabilities of all kinds."""
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
    inputs = AlgorithmInputs(old=old, reference=reference, values=values, final_values=final)
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
        old=tensor(old),
        gen=tensor(sequences.gen_logprobs),
        advantages=tensor(columns.advantages),
        policy_weights=tensor(columns.policy_weights),
        scale=scale[number],
        ref=tensor(reference),
        kl_weights=tensor(columns.reference_kl_weights),
        entropy=-tensor(cur),
        entropy_weights=tensor(columns.entropy_weights),
        cross_entropy_weights=tensor(columns.cross_entropy_weights),
        sequence=owner,
    )
    return float(token_loss(tokens, settings, MetricSums())[0])


def is_fixed(section: type[BaseModel], key: str) -> bool:
    """A key with one value: any other is refused."""
    annotation = section.model_fields[key].annotation
    return typing.get_origin(annotation) is Literal and len(typing.get_args(annotation)) == 1


def own_keys(fixed: bool) -> list[tuple[type[TokenLoss], str]]:
    """Each section's keys, those of `kind: grpo` and those that another section adds or declares anew.

    What a key does over several iterations is shown elsewhere: `adaptive_kl` below, `teacher` and `reference_every` by stages,
    `critic` by test_ppo.
    """
    return [
        (section, key)
        for section in SECTIONS
        for key in section.model_fields
        if key not in ("kind", "adaptive_kl", "teacher", "target", "reference_every", "critic")
        and is_fixed(section, key) == fixed
    ]


def named(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def basic(section: type[TokenLoss]) -> dict[str, Any]:
    [kind] = typing.get_args(section.model_fields["kind"].annotation)
    return {"kind": kind} | REQUIRED.get(kind, {})


@pytest.mark.parametrize(("section", "key"), own_keys(fixed=True), ids=named)
def test_a_key_with_one_value_refuses_others(section: type[TokenLoss], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        section_of(basic(section) | {key: "another"})


@pytest.mark.parametrize(("section", "key"), own_keys(fixed=False), ids=named)
def test_a_key_changes_the_loss_or_is_refused(section: type[TokenLoss], key: str) -> None:
    beside, change = CHANGES[key]
    try:
        before, after = basic(section) | beside, basic(section) | beside | change
        section_of(after)
    except ValidationError:
        return
    assert loss_of(before) != loss_of(after)


@pytest.mark.parametrize("part", PARTS)
def test_a_key_of_the_shaping_changes_the_loss(part: str) -> None:
    before, after = ({"kind": "dr_grpo", "reward": reward} for reward in PARTS[part])
    assert loss_of(before) != loss_of(after)


def test_a_reward_outside_of_the_source_is_refused_or_clamped() -> None:
    narrow = {"source": [0.0, 0.5]}
    with pytest.raises(DataError, match="outside"):
        loss_of({"kind": "grpo", "reward": {"scaling": narrow}})
    loss_of({"kind": "grpo", "reward": {"scaling": narrow | {"outside": "clamp"}}})


@pytest.mark.parametrize("controller", [{"target": 0.9}, {"horizon": 10.0}], ids=str)
def test_the_controller_of_the_kl(controller: dict[str, float]) -> None:
    def after(**keys: float) -> float:
        given: Any = section_of({"kind": "grpo", "kl_coefficient": 0.1, "adaptive_kl": keys})
        return next_coefficient(0.1, 1.0, 64, given.adaptive_kl)

    assert after(**controller) != after()
    assert next_coefficient(0.1, 1.0, 64, None) == 0.1
