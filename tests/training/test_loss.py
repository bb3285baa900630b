from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.training.algorithms import LossSettings, build_algorithm
from roundhouse.training.loss import (
    LossTokens,
    MetricSums,
    add_mismatch,
    clipped_policy_loss,
    correction_weights,
    reference_kl,
    sequence_scale,
    token_loss,
)
from roundhouse.training.metrics import METRICS, Denominator
from tests.training import reference

LENGTHS = [3, 1, 7, 2]
OWNER = torch.tensor([s for s, length in enumerate(LENGTHS) for _ in range(length)])


def _tokens(seed: int = 0) -> dict[str, list[float]]:
    rng = random.Random(seed)
    old = [-rng.uniform(0.1, 6) for _ in OWNER]
    return {
        "old": old,
        "cur": [value + rng.gauss(0, 0.5) for value in old],
        "gen": [value + rng.gauss(0, 1.0) for value in old],
        "ref": [value + rng.gauss(0, 1.0) for value in old],
        "advantages": [rng.gauss(0, 1) for _ in OWNER],
    }


def _plain(
    values: dict[str, list[float]], aggregation: str, kl: str | None, **policy: Any
) -> tuple[float, torch.Tensor]:
    cur = torch.tensor(values["cur"], dtype=torch.float64, requires_grad=True)
    terms: list[list[Any]] = [[] for _ in LENGTHS]
    for i, owner in enumerate(OWNER.tolist()):
        old = torch.tensor(values["old"][i], dtype=torch.float64)
        term = reference.token_term(cur[i], old, values["gen"][i], values["advantages"][i], **policy)
        if kl is not None:
            term = term + 0.3 * reference.kl_term(cur[i], torch.tensor(values["ref"][i], dtype=torch.float64), kl)
        terms[owner].append(term)
    loss = reference.mean(terms, aggregation)
    loss.backward()
    assert cur.grad is not None
    return float(loss.detach()), cur.grad


def _ours(
    values: dict[str, list[float]], aggregation: str, kl: str | None, **policy: Any
) -> tuple[float, torch.Tensor]:
    tensors = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    cur = tensors["cur"].requires_grad_()
    counts = torch.tensor(LENGTHS)
    settings = LossSettings(
        clip_low=policy.get("clip_low", 0.2),
        clip_high=policy.get("clip_high", 0.28),
        dual_clip=policy.get("dual_clip"),
        kl_estimator=kl or "k3",  # type: ignore[arg-type]
        aggregation=aggregation,  # type: ignore[arg-type]
        mismatch_correction=policy.get("correction", "none"),
        mismatch_bounds=policy.get("bounds", (0.5, 5.0)),
    )
    scale = sequence_scale(counts, settings.aggregation)[OWNER].double()
    ones = torch.ones_like(cur)
    tokens = LossTokens(
        cur=cur,
        old=tensors["old"],
        gen=tensors["gen"],
        advantages=tensors["advantages"],
        policy_weights=ones,
        scale=scale,
        ref=tensors["ref"] if kl else None,
        kl_weights=ones * 0.3,
    )
    loss, _ = token_loss(tokens, settings, MetricSums())
    loss.backward()
    assert cur.grad is not None
    return float(loss.detach()), cur.grad


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"clip_low": 0.05, "clip_high": 0.5},
        {"clip_low": 0.4, "clip_high": 0.01},
        {"dual_clip": 1.2},
        {"dual_clip": 3.0, "clip_high": 5.0},
        {"correction": "tis"},
        {"correction": "tis", "bounds": (0.9, 1.1)},
        {"correction": "icepop", "bounds": (0.7, 1.6)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
def test_loss_and_gradient_equal_the_plain_reference(aggregation: str, policy: dict[str, Any], kl: str | None) -> None:
    for seed in range(3):
        values = _tokens(seed)
        loss, gradient = _ours(values, aggregation, kl, **policy)
        expected, expected_gradient = _plain(values, aggregation, kl, **policy)
        assert loss == pytest.approx(expected, rel=1e-6, abs=1e-7)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def test_the_clip_removes_the_gradient_only_where_moving_on_would_help_the_loss() -> None:
    settings = LossSettings(clip_low=0.2, clip_high=0.28)
    ratio = torch.tensor([0.7, 0.7, 1.4, 1.4, 1.0, 1.25], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    clipped_policy_loss(ratio, advantages, settings).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [-1.0, 0.0, 0.0, 1.0, -1.0, -1.0]  # 1.25 is inside the upper, wider bound


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    settings = LossSettings(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    ratio = torch.tensor([10.0, 10.0])
    loss = clipped_policy_loss(ratio, torch.tensor([-2.0, 2.0]), settings)
    torch.testing.assert_close(loss, torch.tensor([6.0, -2.4]))


def test_a_first_update_has_ratio_one_and_the_policy_gradient() -> None:
    cur = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.5])
    ones = torch.ones(2)
    tokens = LossTokens(
        cur=cur, old=cur.detach(), gen=cur.detach(), advantages=advantages, policy_weights=ones, scale=ones / 2
    )
    sums = MetricSums()
    loss, _ = token_loss(tokens, LossSettings(), sums)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5)
    torch.testing.assert_close(cur.grad, -advantages / 2)
    assert sums.values()["probs_ratio"] == 1.0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_kl_gradient_is_that_of_the_true_divergence_on_average(kind: str) -> None:
    """Summed over the policy's distribution, value and gradient of the estimator are those of KL(policy ‖ reference)."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(7, dtype=torch.float64), 0)
    cur = torch.log_softmax(logits, 0)
    exact = (cur.exp() * (cur - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (cur.exp().detach() * reference_kl(cur, ref, kind)).sum()  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert float(estimate.detach()) == pytest.approx(float(exact.detach()), rel=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_the_kl_is_clamped_and_then_pulls_no_more() -> None:
    cur = torch.tensor([-50.0, -1.0], requires_grad=True)
    kl = reference_kl(cur, torch.tensor([-1.0, -50.0]), "k3")
    assert kl.tolist() == [10.0, 10.0]
    kl.sum().backward()
    assert cur.grad is not None
    assert cur.grad.tolist() == [0.0, 0.0]


def test_correction_weights_are_bounded_and_a_ratio_that_is_not_finite_counts_as_zero() -> None:
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    gen = torch.log(torch.tensor([0.5, 0.05, 2.0, 0.0]))
    assert correction_weights(old, gen, LossSettings()) is None
    tis, icepop = (correction_weights(old, gen, LossSettings(mismatch_correction=kind)) for kind in ("tis", "icepop"))  # type: ignore[arg-type]
    torch.testing.assert_close(tis, torch.tensor([1.0, 5.0, 0.5, 0.0]))
    torch.testing.assert_close(icepop, torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_truncation_never_lifts_a_token_that_the_policy_has_unlearnt() -> None:
    """A lower bound of 0.5 would give the first one 25 times its weight."""
    defaults = GRPOConfig(mismatch_correction="tis")
    assert (defaults.bounds, GRPOConfig(mismatch_correction="icepop").bounds) == ((0.0, 2.0), (0.5, 5.0))
    settings = LossSettings(mismatch_correction="tis", mismatch_bounds=defaults.bounds)
    weights = correction_weights(torch.log(torch.tensor([0.02, 1.0, 9.0])), torch.zeros(3), settings)
    torch.testing.assert_close(weights, torch.tensor([0.02, 1.0, 2.0]))


def test_by_default_sequences_that_differ_by_more_than_rounding_are_corrected() -> None:
    """One sequence is off by 0.009 nats a token, one by 0.011 with a token that the engine drew far too often."""
    settings = build_algorithm(GRPOConfig()).loss
    off = torch.tensor([0.009, -0.009, 0.009, *[-0.001] * 98, -0.1, 0.9, 0.0, math.nan])
    sequence = torch.tensor([0] * 3 + [1] * 100 + [2] * 2)
    weights = correction_weights(off, torch.zeros(105), settings, sequence)
    assert weights is not None
    assert weights[:3].tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(weights[3:103], off[3:103].exp().clamp(max=2))
    assert weights[103:].tolist() == [1.0, 0.0], "a value that is not a number is no agreement"
    assert build_algorithm(GRPOConfig(mismatch_correction="none")).loss.whole_sequences is False


@pytest.mark.parametrize(("tokens", "noise"), [(1_000, 0.05), (8_000, 0.01), (8_000, 0.05)])
def test_rounding_does_not_decide_the_weight_of_a_long_sequence(tokens: int, noise: float) -> None:
    """With GSPO. As a product over the sequence, the weight of most of these lay at one of the bounds."""
    generator = torch.Generator().manual_seed(0)
    gen = torch.full((tokens,), -1.0)
    settings = LossSettings(importance_ratio="sequence", mismatch_correction="tis", mismatch_bounds=(0.0, 2.0))
    for _ in range(20):
        old = gen + noise * torch.randn(tokens, generator=generator)
        weights = correction_weights(old, gen, settings, torch.zeros(tokens, dtype=torch.int64))
        torch.testing.assert_close(weights, torch.ones(tokens), rtol=0, atol=0.01)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_weight_of_the_kl_term_is_bounded(estimator: str) -> None:
    """A token that the engine found 8 or 12 nats less likely than the policy does would weigh thousands."""
    cur = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    ref, gen = torch.full((4,), -2.0), torch.tensor([-1.0, -1.5, -9.0, -200.0])
    plain = reference_kl(cur.detach(), ref, estimator)  # type: ignore[arg-type]
    weighted = reference_kl(cur, ref, estimator, gen)  # type: ignore[arg-type]
    torch.testing.assert_close(weighted / plain, torch.tensor([1.0, math.exp(0.5), 2.0, 2.0]))
    weighted.sum().backward()
    assert cur.grad is not None
    assert cur.grad.isfinite().all()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("nats", [50.0, 100.0, -100.0])
def test_however_far_a_token_moved_its_gradient_is_finite(ratio: str, nats: float) -> None:
    """Above 88 nats the ratio is infinite in float32: its gradient was NaN under the clip, and 5e21 at 50 nats without it."""
    for advantage in (1.0, -1.0):
        cur = torch.tensor([nats - 1, -1.0], requires_grad=True)
        ones, old = torch.ones(2), torch.full((2,), -1.0)
        settings = LossSettings(importance_ratio=ratio, aggregation="sequence")  # type: ignore[arg-type]
        owner = torch.tensor([0, 1])
        tokens = LossTokens(cur, old, old, advantage * ones, policy_weights=ones, scale=ones, sequence=owner)
        token_loss(tokens, settings, MetricSums())[0].backward()
        assert cur.grad is not None
        assert cur.grad.tolist() == [0.0, -advantage]


def test_mismatch_statistics_equal_loops_over_tokens() -> None:
    values = _tokens(5)
    sums = MetricSums()
    add_mismatch(sums, torch.tensor(values["old"]), torch.tensor(values["gen"]), OWNER, (0.5, 2.0))
    found = sums.values()
    pairs = list(zip(values["old"], values["gen"], strict=True))
    n = len(pairs)
    js = 0.0
    for old, gen in pairs:
        mixture = math.log((math.exp(old) + math.exp(gen)) / 2)
        js += sum(math.exp(mixture - x) - (mixture - x) - 1 for x in (old, gen)) / 2
    per_sequence = [
        sum(math.exp(abs(o - g)) for (o, g), s in zip(pairs, OWNER.tolist(), strict=True) if s == sequence) / length
        for sequence, length in enumerate(LENGTHS)
    ]
    expected = {
        "token_mult_prob_error": sum(math.exp(abs(gen - old)) for old, gen in pairs) / n,
        "gen_kl_error": sum(math.exp(old - gen) - (old - gen) - 1 for old, gen in pairs) / n,
        "policy_kl_error": sum(math.exp(gen - old) - (gen - old) - 1 for old, gen in pairs) / n,
        "js_divergence_error": js / n,
        "sampling_importance_ratio": sum(math.exp(old - gen) for old, gen in pairs) / n,
        "is_oob_ratio": sum(not 0.5 <= math.exp(old - gen) <= 2.0 for old, gen in pairs) / n,
        "logprob_abs_diff_mean": sum(abs(old - gen) for old, gen in pairs) / n,
        "logprob_abs_diff_max": max(abs(old - gen) for old, gen in pairs),
        "seq_mult_prob_error_max": max(per_sequence),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_sums_over_uneven_parts_give_the_mean_of_the_whole() -> None:
    values = torch.randn(10)
    whole, parts = MetricSums(), MetricSums()
    for name in ("probs_ratio", "probs_ratio_max", "probs_ratio_min"):
        whole.add(name, values)
        for part in (values[:1], values[1:3], values[3:]):
            parts.add(name, part)
    assert parts.values() == pytest.approx(whole.values(), rel=1e-12)


def test_every_metric_declares_its_denominator() -> None:
    assert all(isinstance(metric.denominator, Denominator) and metric.meaning for metric in METRICS.values())
