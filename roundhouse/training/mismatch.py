"""The engine that generated and the trainer that learns are two programs: how far their log-probabilities lie apart.

Invariant: the statistics are always computed, over the trained tokens, with the trainer's log-probabilities from before the
first update (`old`); so they compare the same weights on the same tokens, and a refit that did not arrive shows here.
All arguments are [M] tensors, one value a trained token.
"""

from __future__ import annotations

from typing import Literal

import torch

from roundhouse.training.metrics import MetricSums


def add_mismatch(
    sums: MetricSums, old: torch.Tensor, gen: torch.Tensor, sequence: torch.Tensor, bounds: tuple[float, float]
) -> None:
    """Add the mismatch statistics to `sums`; `sequence` [M] numbers each token's sequence, from 0 without gaps.

    The divergences are k3 estimates from tokens the engine sampled (Schulman, "Approximating KL divergence", 2020):
    with x = log q − log p and samples from p, KL(p ‖ q) ≈ exp(x) − 1 − x.
    """
    old, gen = old.double(), gen.double()
    difference = old - gen
    ratio = torch.exp(difference)
    multiple = torch.exp(difference.abs())
    mixture = torch.logaddexp(old, gen) - torch.log(torch.tensor(2.0, dtype=torch.float64, device=old.device))
    sums.add("token_mult_prob_error", multiple)
    sums.add("gen_kl_error", _k3(difference))
    sums.add("policy_kl_error", _k3(-difference))
    sums.add("js_divergence_error", (_k3(mixture - old) + _k3(mixture - gen)) / 2)
    sums.add("sampling_importance_ratio", ratio)
    sums.add("is_oob_ratio", ((ratio < bounds[0]) | (ratio > bounds[1])).double())
    sums.add("logprob_abs_diff_mean", difference.abs())
    sums.add("logprob_abs_diff_max", difference.abs())
    sums.add("seq_mult_prob_error_max", sequence_means(multiple, sequence))


def correction_weights(
    old: torch.Tensor, gen: torch.Tensor, kind: Literal["none", "tis", "icepop"], bounds: tuple[float, float]
) -> torch.Tensor | None:
    """Per-token weight w = exp(old − gen) of the policy loss, bounded; None without correction.

    tis: clamped to the bounds (truncated importance sampling). icepop: 0 outside of the bounds. A ratio that is not
    finite becomes 0. A token of weight 0 still counts in the loss' denominator.
    """
    if kind == "none":
        return None
    low, high = bounds
    ratio = torch.exp(old - gen)
    bounded = ratio.clamp(low, high)
    kept = torch.isfinite(ratio) if kind == "tis" else ratio == bounded
    return torch.where(kept, bounded, torch.zeros_like(ratio))


def sequence_means(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[n] mean over each sequence's tokens."""
    totals = torch.zeros(int(sequence.max()) + 1, dtype=values.dtype, device=values.device)
    counts = torch.zeros_like(totals)
    totals.index_add_(0, sequence, values)
    counts.index_add_(0, sequence, torch.ones_like(values))
    return totals / counts


def _k3(x: torch.Tensor) -> torch.Tensor:
    return torch.expm1(x) - x
