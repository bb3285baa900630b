"""Every kind of loss, ratio, correction and mean against the plain reference: values, autograd, finite differences."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundhouse.config.algorithms import GRPOConfig
from roundhouse.errors import ConfigError
from roundhouse.training.algorithms import LossSettings, build_algorithm
from roundhouse.training.algorithms.policy_gradient import sampled_kl
from roundhouse.training.loss import (
    LossTokens,
    MetricSums,
    add_correction,
    correction_weights,
    reference_kl,
    sequence_scale,
    token_loss,
)
from tests.training import reference

LENGTHS = [3, 1, 7, 2, 4]
ROLLOUTS = ["a", "b", "a", "c", "c"]
OWNER = [s for s, length in enumerate(LENGTHS) for _ in range(length)]

KINDS: list[dict[str, Any]] = [
    {"ratio": "sequence", "aggregation": "sequence"},
    {"ratio": "sequence", "aggregation": "rollout", "clip_low": 0.05, "clip_high": 0.02},
    {"ratio": "sequence", "aggregation": "sequence", "dual_clip": 1.1, "clip_high": 5.0},
    {"ratio": "sequence", "aggregation": "sequence", "correction": "tis"},
    {"ratio": "sequence", "aggregation": "sequence", "correction": "icepop", "bounds": (0.1, 2.0)},
    {"ratio": "on_policy"},
    {"kind": "cispo"},
    {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.1, "correction": "icepop"},
    {"kind": "reinforce"},
    {"kind": "reinforce", "correction": "tis", "aggregation": "fixed_length"},
    {"aggregation": "rollout"},
    {"aggregation": "fixed_length"},
    {"correction": "seq-mask-tis", "bounds": (0.8, 1.25)},
    {"correction": "icepop", "max_error": 2.0},
    {"max_error": 2.0, "aggregation": "sequence"},
]


def _values(seed: int) -> dict[str, list[float]]:
    rng = random.Random(seed)
    old = [-rng.uniform(0.1, 6) for _ in OWNER]
    return {
        "old": old,
        "cur": [value + rng.gauss(0, 0.5) for value in old],
        "gen": [value + rng.gauss(0, 0.6) for value in old],
        "advantages": [rng.gauss(0, 1) for _ in OWNER],
        "cross_entropy_weights": [rng.choice([0.0, 0.3]) for _ in OWNER],
    }


def _settings(kind: dict[str, Any]) -> LossSettings:
    return LossSettings(
        policy_loss=kind.get("kind", "clipped"),
        importance_ratio=kind.get("ratio", "token"),
        clip_low=kind.get("clip_low", 0.2),
        clip_high=kind.get("clip_high", 0.28),
        dual_clip=kind.get("dual_clip"),
        aggregation=kind.get("aggregation", "token"),
        fixed_length=6,
        mismatch_correction=kind.get("correction", "none"),
        mismatch_bounds=kind.get("bounds", (0.5, 5.0)),
        max_sequence_error=kind.get("max_error"),
    )


def _scale(loss: LossSettings) -> torch.Tensor:
    """[M] over the whole update."""
    rollouts = torch.tensor([sorted(set(ROLLOUTS)).index(name) for name in ROLLOUTS])
    counts = torch.tensor(LENGTHS)
    return sequence_scale(counts, loss.aggregation, rollouts=rollouts, fixed_length=6)[OWNER].double()


def _tokens(values: dict[str, list[float]], scale: torch.Tensor, chosen: list[int]) -> LossTokens:
    """The tokens of the chosen sequences; numbers of sequences stay those of the whole, hence have gaps."""
    keep = torch.tensor([owner in chosen for owner in OWNER])
    columns = {name: torch.tensor(column, dtype=torch.float64)[keep] for name, column in values.items()}
    columns["cur"].requires_grad_()
    ones = torch.ones(int(keep.sum()), dtype=torch.float64)
    return LossTokens(**columns, policy_weights=ones, scale=scale[keep], sequence=torch.tensor(OWNER)[keep])


def _ours(values: dict[str, list[float]], kind: dict[str, Any], parts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Loss and gradient, added up over parts of the update."""
    loss_settings = _settings(kind)
    scale, total, gradient = _scale(loss_settings), 0.0, torch.zeros(len(OWNER), dtype=torch.float64)
    for part in parts:
        tokens = _tokens(values, scale, part)
        loss, _ = token_loss(tokens, loss_settings, MetricSums())
        loss.backward()
        total += float(loss.detach())
        assert tokens.cur.grad is not None
        gradient[torch.tensor([owner in part for owner in OWNER])] = tokens.cur.grad
    return total, gradient


def _plain(values: dict[str, list[float]], kind: dict[str, Any]) -> tuple[float, torch.Tensor]:
    cur = torch.tensor(values["cur"], dtype=torch.float64, requires_grad=True)
    terms = []
    for sequence in range(len(LENGTHS)):
        own = [i for i, owner in enumerate(OWNER) if owner == sequence]
        policy = {name: value for name, value in kind.items() if name != "aggregation"}
        policy_terms = reference.policy_terms(
            [cur[i] for i in own],
            [torch.tensor(values["old"][i], dtype=torch.float64) for i in own],
            [values["gen"][i] for i in own],
            [values["advantages"][i] for i in own],
            **policy,
        )
        likelihood = [-values["cross_entropy_weights"][i] * cur[i] for i in own]
        terms.append([a + b for a, b in zip(policy_terms, likelihood, strict=True)])
    loss = reference.mean(terms, kind.get("aggregation", "token"), ROLLOUTS, length=6)
    loss.backward()
    assert cur.grad is not None
    return float(loss.detach()), cur.grad


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_value_and_gradient_equal_the_plain_reference_whole_and_in_uneven_parts(kind: dict[str, Any]) -> None:
    for seed in range(4):
        values = _values(seed)
        expected, expected_gradient = _plain(values, kind)
        for parts in ([[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]], [[4, 0], [2], [1], [3]]):
            loss, gradient = _ours(values, kind, parts)
            assert loss == pytest.approx(expected, rel=1e-6, abs=1e-7)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"dual_clip": 1.2},
        {"ratio": "sequence", "aggregation": "sequence"},
        {"kind": "reinforce"},
        {"correction": "tis", "aggregation": "rollout"},
    ],
    ids=str,
)
def test_the_gradient_is_the_slope_of_the_loss(kind: dict[str, Any]) -> None:
    """Central differences; on_policy and cispo are omitted, because their gradient is by design not that of their value."""
    values, step = _values(7), 1e-6
    _, gradient = _ours(values, kind, [[0, 1, 2, 3, 4]])
    for i in range(len(OWNER)):
        moved = []
        for direction in (step, -step):
            shifted = values | {"cur": [v + direction * (j == i) for j, v in enumerate(values["cur"])]}
            moved.append(_ours(shifted, kind, [[0, 1, 2, 3, 4]])[0])
        assert (moved[0] - moved[1]) / (2 * step) == pytest.approx(float(gradient[i]), rel=1e-4, abs=1e-7)


def test_cispo_gives_a_clipped_token_the_gradient_that_ppo_takes_away() -> None:
    old, cur = torch.tensor([-2.0]), torch.tensor([-1.0], requires_grad=True)  # ratio e, far above 1.28
    ones = torch.ones(1)
    gradients = []
    for kind in ("clipped", "cispo"):
        cur.grad = None
        tokens = LossTokens(cur=cur, old=old, gen=old, advantages=ones, policy_weights=ones, scale=ones)
        token_loss(tokens, LossSettings(policy_loss=kind, clip_high=0.28), MetricSums())[0].backward()
        assert cur.grad is not None
        gradients.append(float(cur.grad))
    assert gradients == pytest.approx([0.0, -1.28])


def own_loss(tokens: LossTokens, ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    clamped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.maximum(-tokens.advantages * ratio, -tokens.advantages * clamped)


def its_sum(tokens: LossTokens, ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    return own_loss(tokens, ratio, settings).sum()


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_a_function_by_name_takes_the_place_of_the_policy_loss(correction: str) -> None:
    given, name = {"correction": correction, "clip_low": 0.1}, f"{__name__}:own_loss"
    for seed in range(3):
        cut = [[0, 1], [2, 3, 4]]
        own, built_in = (_ours(_values(seed), given | kind, cut) for kind in ({"kind": name}, {}))
        assert own[0] == built_in[0] != _ours(_values(seed), given | {"kind": "reinforce"}, cut)[0]
    with pytest.raises(ConfigError, match=r"gives the shape \(\) for 17 tokens. Return one term for each"):
        _ours(_values(0), {"kind": f"{__name__}:its_sum"}, [[0, 1, 2, 3, 4]])


def test_a_policy_loss_that_is_not_there_is_refused_when_the_algorithm_is_made() -> None:
    config = GRPOConfig(policy_loss=f"{__name__}:absent")
    with pytest.raises(
        ConfigError, match=r"train.algorithm.policy_loss is .*has no function absent. Available: .*own_loss"
    ):
        build_algorithm(config)


def test_a_forced_on_policy_ratio_has_the_gradient_of_reinforce_whatever_old_says() -> None:
    values = _values(1)
    far = values | {"old": [value - 3 for value in values["old"]]}
    _, on_policy = _ours(far, {"ratio": "on_policy"}, [[0, 1, 2, 3, 4]])
    _, reinforce = _ours(values, {"kind": "reinforce"}, [[0, 1, 2, 3, 4]])
    torch.testing.assert_close(on_policy, reinforce)


def test_a_rollout_counts_once_in_the_two_stage_mean_however_often_it_was_split() -> None:
    """One rollout of two sequences and one of a single sequence: each has half of the weight."""
    scale = sequence_scale(torch.tensor([4, 2, 5]), "rollout", rollouts=torch.tensor([7, 7, 3]))
    torch.testing.assert_close(scale * torch.tensor([4, 2, 5]), torch.tensor([0.25, 0.25, 0.5]))
    by_sequence = sequence_scale(torch.tensor([4, 2, 5]), "sequence") * torch.tensor([4, 2, 5])
    torch.testing.assert_close(by_sequence, torch.full((3,), 1 / 3))


def test_a_fixed_length_gives_tokens_of_short_and_long_rollouts_the_same_weight() -> None:
    scale = sequence_scale(torch.tensor([1, 50]), "fixed_length", fixed_length=100)
    torch.testing.assert_close(scale, torch.full((2,), 1 / 200))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_scales_of_a_mean_add_up_to_one(sequences: list[tuple[int, int]]) -> None:
    lengths, rollouts = (torch.tensor(column) for column in zip(*sequences, strict=True))
    for aggregation in ("token", "sequence", "rollout"):
        scale = sequence_scale(lengths, aggregation, rollouts=rollouts)  # type: ignore[arg-type]
        assert float((scale * lengths).sum()) == pytest.approx(1.0, rel=1e-5)


def test_a_correction_that_is_not_finite_is_zero_and_counted() -> None:
    old = torch.tensor([-1.0, 200.0, -1.0, -1.0])  # exp(200 - gen) overflows float32
    gen, sequence = torch.tensor([-1.0, -1.0, -1.0, -1.2]), torch.tensor([0, 0, 1, 1])
    for kind in ("tis", "icepop", "seq-mask-tis"):
        sums = MetricSums()
        weights = correction_weights(old, gen, LossSettings(mismatch_correction=kind), sequence)  # type: ignore[arg-type]
        assert weights is not None
        assert torch.isfinite(weights).all()
        assert weights[1] == 0
        add_correction(sums, old, gen, LossSettings(mismatch_correction=kind), sequence)  # type: ignore[arg-type]
        assert sums.values()["correction_nonfinite"] == 1
        assert sums.values()["correction_dropped"] == (0.5 if kind == "seq-mask-tis" else 0.25)


def test_the_sequence_mask_drops_whole_sequences_by_their_geometric_mean_and_keeps_raw_weights() -> None:
    gen = torch.zeros(4)
    old = torch.tensor([0.5, -0.5, 0.01, 0.02])  # geometric means 1 and exp(0.015) = 1.0151
    loss = LossSettings(mismatch_correction="seq-mask-tis", mismatch_bounds=(0.999, 1.002))
    weights = correction_weights(old, gen, loss, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(weights, torch.tensor([math.exp(0.5), math.exp(-0.5), 0.0, 0.0]))


def test_sequences_far_from_the_engine_are_left_out_and_counted() -> None:
    old, gen = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -1.05])
    loss, sequence, sums = LossSettings(max_sequence_error=1.1), torch.tensor([0, 0, 1]), MetricSums()
    # means of exp(abs(old - gen)): (1 + e) / 2 = 1.86 and exp(0.05) = 1.05
    weights = correction_weights(old, gen, loss, sequence)
    assert weights is not None
    assert weights.tolist() == [0.0, 0.0, 1.0]
    add_correction(sums, old, gen, loss, sequence)
    assert sums.values()["num_masked_seqs"] == 1


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_weighted_for_an_older_policy_equals_the_reference_and_is_unbiased(kind: Any) -> None:
    torch.manual_seed(0)
    cur = (-torch.rand(9, dtype=torch.float64) * 4).requires_grad_()
    ref, gen = cur.detach() + torch.randn(9).double(), cur.detach() + 0.3 * torch.randn(9).double()
    reference_kl(cur, ref, kind, gen).sum().backward()
    plain = cur.detach().clone().requires_grad_()
    sum(reference.kl_term(plain[i], ref[i], kind, float(gen[i])) for i in range(9)).backward()
    torch.testing.assert_close(cur.grad, plain.grad)
    if kind != "k2":  # k2's expectation is no KL
        logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
        policy = torch.log_softmax(logits, 0)
        old = torch.log_softmax(logits.detach() + 0.2 * torch.randn(7).double(), 0)  # near: no weight is at its bound
        target = torch.log_softmax(torch.randn(7).double(), 0)
        exact = (policy.exp() * (policy - target)).sum()
        (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
        estimate = (old.exp() * reference_kl(policy, target, kind, old)).sum()  # tokens sampled from the older policy
        (found,) = torch.autograd.grad(estimate, logits)
        assert float(estimate.detach()) == pytest.approx(float(exact.detach()))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_in_the_reward_has_the_value_of_the_one_in_the_loss(kind: Any) -> None:
    rng = np.random.default_rng(0)
    old, ref = -rng.exponential(9, 200), -rng.exponential(9, 200)
    expected = reference_kl(torch.tensor(old), torch.tensor(ref), kind)
    np.testing.assert_allclose(sampled_kl(old, ref, kind), expected.numpy(), rtol=1e-12)
    assert (np.abs(sampled_kl(old, ref, kind)) == 10).any(), "the clamp acts in this test"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_token_of_another_sequence_enters_a_sequences_ratio(data: st.DataObject) -> None:
    """GSPO's loss of a sequence is the same with any other sequences in its microbatch."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    owner = torch.tensor([s for s, n in enumerate(lengths) for _ in range(n)])
    rng = random.Random(sum(lengths))
    cur, old = (torch.tensor([rng.gauss(-2, 1) for _ in owner], dtype=torch.float64) for _ in range(2))
    ones = torch.ones(len(owner), dtype=torch.float64)
    gspo = LossSettings(importance_ratio="sequence", aggregation="sequence")
    tokens = LossTokens(cur=cur, old=old, gen=old, advantages=ones, policy_weights=ones, scale=ones, sequence=owner)
    whole, _ = token_loss(tokens, gspo, MetricSums())
    alone = 0.0
    for s in range(len(lengths)):
        keep = owner == s
        part = {f.name: getattr(tokens, f.name) for f in dataclasses.fields(LossTokens)}
        part = {name: None if value is None else value[keep] for name, value in part.items()}
        alone += float(token_loss(LossTokens(**part), gspo, MetricSums())[0])
    assert float(whole) == pytest.approx(alone)
