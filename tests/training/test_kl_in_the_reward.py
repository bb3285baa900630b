"""KL as a part of the reward brings the policy back to the reference, which only k1 does."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from roundhouse.config.algorithms import AlgorithmConfig
from roundhouse.config.loading import parse_config
from roundhouse.config.models import OptimizerConfig, TrainConfig
from roundhouse.training.algorithms.policy_gradient import sampled_kl
from roundhouse.training.service.verbs import Role
from tests.training.bigram import BigramService, exact_kl, rollouts, trainer_over

VOCABULARY = 16


def algorithm(**settings: Any) -> Any:
    return TypeAdapter(AlgorithmConfig).validate_python(settings)


def policy_and_reference(drift: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    return reference + drift * torch.randn(VOCABULARY, VOCABULARY, generator=generator), reference


def drifts(section: Any, iterations: int = 20) -> tuple[list[float], list[float]]:
    """Exact KL to the reference after each iteration, and the coefficient in it, where nothing but the KL is to be learnt."""
    policy, reference = policy_and_reference()
    service = BigramService(policy, reference)
    optimizer = OptimizerConfig(learning_rate=0.1, warmup_steps=0)
    config = TrainConfig(minibatches=1, optimizer=optimizer).model_copy(update={"algorithm": section})
    trainer = trainer_over(service, config)
    logits = service.models[Role.POLICY]
    found, coefficients = [exact_kl(logits, reference)], []
    for iteration in range(1, iterations + 1):
        batch = rollouts(logits, 256, 8, group_size=4, seed=iteration)
        coefficients.append(trainer.step(batch, iteration).metrics["kl_coefficient"])
        found.append(exact_kl(logits, reference))
    return found, coefficients


def test_with_nothing_else_to_learn_kl_in_the_reward_leads_back_to_the_reference() -> None:
    found, _ = drifts(algorithm(kind="reinforce_plus_plus", kl_coefficient=0.1))
    assert found[-1] < found[10] < 0.5 * found[0]
    assert found[-1] < 0.1 * found[0], found


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_other_estimators_in_the_reward_lead_away_from_it(estimator: str) -> None:
    """Why they are refused: the algorithm as it would be with them."""
    section = algorithm(kind="reinforce_plus_plus", kl_coefficient=0.1).model_copy(update={"kl_estimator": estimator})
    found, _ = drifts(section)
    assert found[-1] > 1.5 * found[0], found


def test_an_adaptive_coefficient_rises_while_the_kl_is_above_its_target_and_brings_it_down() -> None:
    adaptive = {"target": 0.05, "horizon": 256}
    found, coefficients = drifts(algorithm(kind="reinforce_plus_plus", kl_coefficient=0.1, adaptive_kl=adaptive))
    assert coefficients[:4] == pytest.approx([0.1 * 1.2**n for n in range(4)])
    assert found[-1] < 0.05 < found[0]
    assert coefficients[-1] < max(coefficients), "below the target it falls again"


@pytest.mark.parametrize(("estimator", "agrees"), [("k1", True), ("k2", False), ("k3", False)], ids=["k1", "k2", "k3"])
def test_the_expected_gradient_of_the_reward_is_the_kls_for_k1_alone(
    estimator: Literal["k1", "k2", "k3"], agrees: bool
) -> None:
    """Over all tokens of 300 random policies: Σ p · k · ∇log p against the gradient of KL(policy ‖ reference)."""
    rng = np.random.default_rng(0)
    cosines, sizes = [], []
    for _ in range(300):
        logits = rng.normal(size=50)
        ours, theirs = (
            values - np.log(np.exp(values).sum()) for values in (logits, logits + 0.1 * rng.normal(size=50))
        )
        p, log_ratio = np.exp(ours), ours - theirs
        exact = p * (log_ratio - (p * log_ratio).sum())
        values = sampled_kl(ours, theirs, estimator)
        learnt = p * (values - (p * values).sum())
        cosines.append(learnt @ exact / np.linalg.norm(learnt) / np.linalg.norm(exact))
        sizes.append(np.linalg.norm(learnt) / np.linalg.norm(exact))
    if agrees:
        assert min(cosines) > 1 - 1e-6
        assert sizes == pytest.approx([1.0] * 300, rel=1e-5)
    else:
        assert abs(np.mean(cosines)) < 0.1
        assert np.mean(sizes) < 0.1


@pytest.mark.parametrize("kind", ["grpo", "rloo", "gspo", "cispo", "reinforce_plus_plus"])
def test_in_the_reward_k1_is_the_default_and_the_others_are_refused(kind: str) -> None:
    assert algorithm(kind=kind, kl_coefficient=0.1, kl_placement="reward").kl_estimator == "k1"
    for estimator in ("k2", "k3"):
        with pytest.raises(
            ValidationError, match=rf"kl_estimator is {estimator} .*Set kl_estimator to k1, or kl_placement"
        ):
            algorithm(kind=kind, kl_coefficient=0.1, kl_placement="reward", kl_estimator=estimator)
        assert algorithm(kind=kind, kl_coefficient=0.1, kl_placement="loss", kl_estimator=estimator)


def test_a_run_that_began_with_another_estimator_can_still_be_read() -> None:
    keys = {"kind": "rloo", "kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k3"}
    found = parse_config({"run_id": "old", "train": {"algorithm": keys}}, recorded=True)
    assert found.train.algorithm.kl_estimator == "k3"
