"""Failed and masked members of a group never vote: neither in its baseline or spread, nor in a mean over the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.config.models import OptimizerConfig, TrainConfig, ValidationConfig
from roundhouse.stages.validate import in_plan_order
from roundhouse.training.algorithms.policy_gradient import Groups, PolicyGradientAlgorithm
from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.records import FailureKind, Rollout, Status, Turn, digest_tokens, groups_with_spread
from roundhouse.trajectories.validation import Validated, validate
from tests.training.bigram import BigramService, trainer_over

VOCABULARY = 8
POLICY, REFERENCE = torch.randn(2, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
ALGORITHMS: list[dict[str, Any]] = [
    {"kind": "grpo"},
    {"kind": "grpo", "leave_one_out": True, "kl_coefficient": 0.1, "entropy_coefficient": 0.0},
    {"kind": "dr_grpo"},
    {"kind": "rloo", "kl_coefficient": 0.1, "kl_placement": "reward"},
    {"kind": "dapo", "reward": {"overlong": {"max_generated_tokens": 6, "buffer_tokens": 4}}},
    {"kind": "gspo", "mismatch_correction": "tis"},
    {"kind": "cispo", "mismatch_correction": "icepop"},
    {"kind": "reinforce_plus_plus"},
    {"kind": "reinforce_plus_plus", "minus_baseline": False},
    {"kind": "gdpo"},
    {"kind": "cross_entropy", "select": "best_of_group"},
    {"kind": "cross_entropy"},
    {"kind": "distillation", "teacher": "t"},
    {"kind": "custom", "target": f"{__name__}:AboveTheMean"},
]


class AboveTheMean(PolicyGradientAlgorithm):
    """+1 above the group's mean, -1 below."""

    def advantages(self, sequences: TrainingSequences, rewards: Any, groups: Groups) -> np.ndarray:
        return np.sign(rewards.values - groups.of_sequences(groups.means))


def member(group: str, sample: int, reward: float) -> Rollout:
    """A completed rollout with tokens that depend on its place; truncated if its sample is a multiple of 5."""
    rng = np.random.default_rng([ord(group), sample])
    prompt, answer = [0, int(rng.integers(VOCABULARY))], rng.integers(0, VOCABULARY, 1 + sample % 5).tolist()
    before = [prompt[-1], *answer[:-1]]
    every = torch.log_softmax(POLICY, -1)
    turn = Turn(
        turn=0,
        parent=None,
        prompt_token_ids=prompt,
        prompt_length=2,
        prompt_digest=digest_tokens(prompt),
        generation_token_ids=answer,
        generation_log_probs=every[before, answer].tolist(),
        policy_version=0,
        finish_reason="stop",
        latency_seconds=0.01,
    )
    return Rollout(
        group_id=group,
        sample=sample,
        task={"task_id": group},
        environment="test",
        status=Status.TRUNCATED if sample % 5 == 4 else Status.COMPLETED,
        reward=reward,
        reward_components={"a": reward * reward, "b": reward - reward * reward},
        items=[{"role": "user", "content": "hi"}],
        turns=[turn],
        finish_reason="stop",
    )


def failed(one: Rollout) -> Rollout:
    kind, code = FailureKind.INFRA, "engine_unreachable"
    return replace(one, status=Status.FAILED, reward=None, reward_components={}, failure_kind=kind, failure_code=code)


def masked(one: Rollout) -> Rollout:
    return replace(one, status=Status.MASKED)


def without_a_reward(one: Rollout) -> Rollout:
    return replace(one, reward=math.nan)


def with_a_broken_prompt(one: Rollout) -> Rollout:
    return replace(one, turns=[replace(one.turns[0], prompt_digest="")])


def of_another_task(one: Rollout) -> Rollout:
    return masked(replace(one, task={"task_id": "other"}))


OUT: list[Callable[[Rollout], Rollout]] = [
    failed,
    masked,
    without_a_reward,
    with_a_broken_prompt,
    of_another_task,
]
rewards = st.sampled_from([0.0, 0.25, 0.5, 1.0])
groups = st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=1, max_size=3)
strays = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from(OUT), st.sampled_from([-50.0, 0.0, 1.0, 50.0])),
    min_size=1,
    max_size=12,
    unique_by=lambda stray: stray[:2],
)


def validated(rollouts: list[Rollout]) -> Validated:
    return validate(in_plan_order(rollouts), ValidationConfig(), vocabulary_size=VOCABULARY, policy_version=0)


def gradients(result: Validated, algorithm: dict[str, Any]) -> list[bytes]:
    """Return the gradients of each update."""
    service = BigramService(POLICY, REFERENCE)
    config = TrainConfig.model_validate(
        {"algorithm": algorithm, "minibatches": 2, "optimizer": OptimizerConfig(warmup_steps=0)}
    )
    if result.sequences.num_rows:
        trainer_over(service, config).step(TrainingSequences.from_table(result.sequences), 1)
    return service.gradients


def with_and_without(
    given_rewards: list[list[float]], added: list[tuple[int, int, Callable[[Rollout], Rollout], float]]
) -> tuple[list[Rollout], list[Rollout]]:
    """The groups of these rewards, and failed or masked members in any of them, between any two of its members."""
    alone = [
        member("ghi"[g], 2 * i + 10, reward) for g, own in enumerate(given_rewards) for i, reward in enumerate(own)
    ]
    return alone, [spoil(member("ghi"[g], 2 * i + 9, reward)) for g, i, spoil, reward in added]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(groups, strays)
def test_failed_and_masked_members_leave_what_is_trained_on_equal(
    given_rewards: list[list[float]], added: list[tuple[int, int, Callable[[Rollout], Rollout], float]]
) -> None:
    """Any number of them, with any reward: the table that every algorithm reads, and the groups that dynamic sampling keeps."""
    alone, others = with_and_without(given_rewards, added)
    before, after = validated(alone), validated([*alone, *others])
    assert after.sequences.equals(before.sequences)
    assert after.ledger.requested == before.ledger.requested + len(others)
    silent = [one for one in others if one.status in (Status.FAILED, Status.MASKED)]
    assert groups_with_spread(in_plan_order([*alone, *silent])) == groups_with_spread(in_plan_order(alone))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(groups, strays)
def test_failed_and_masked_members_leave_the_gradient_of_every_algorithm_byte_equal(
    given_rewards: list[list[float]], added: list[tuple[int, int, Callable[[Rollout], Rollout], float]]
) -> None:
    alone, others = with_and_without(given_rewards, added)
    before, after = validated(alone), validated([*alone, *others])
    for algorithm in ALGORITHMS:
        assert gradients(after, algorithm) == gradients(before, algorithm), algorithm


def test_the_gradients_that_are_compared_are_some() -> None:
    """Each algorithm has a gradient from the groups above, so that equal bytes are meaningful."""
    result = validated([member("g", 2 * i + 10, reward) for i, reward in enumerate([1.0, 0.0, 0.25, 1.0])])
    for algorithm in ALGORITHMS:
        found = gradients(result, algorithm)
        assert found, algorithm
        assert all(np.frombuffer(each, np.float32).any() for each in found), algorithm
