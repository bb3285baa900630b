"""The engine that generated and the trainer that learns are two programs: how far their log-probabilities lie apart.

Invariant: the statistics are always computed, over the trained tokens, with the trainer's log-probabilities from before the
first update (`old`); so they compare the same weights on the same tokens, and a refit that did not arrive shows here.
All arguments are [M] tensors, one value a trained token.
"""

from __future__ import annotations

import torch

from roundhouse.training.algorithm import LossSettings
from roundhouse.training.metrics import MetricSums
from roundhouse.trajectories.sequences import FEWEST_TOKENS


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
    old: torch.Tensor, gen: torch.Tensor, settings: LossSettings, sequence: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Per-token weight w of the policy loss, from the ratio exp(old − gen); None where nothing is to be corrected.

        tis            w = clamp(ratio, bounds): truncated importance sampling
        icepop         w = ratio inside the bounds, else 0
        seq-mask-tis   w = ratio in sequences whose geometric mean of the ratio is inside the bounds, else 0

    With a ratio of whole sequences (GSPO), the correction's is the geometric mean over the sequence too: a product grows with
    the length, and lies at a bound by rounding alone in a long sequence. A ratio that is not finite becomes 0, and so does
    every token of a sequence whose mean of exp(abs(old − gen)) is above `max_sequence_error`. A token of weight 0 still counts
    in the loss' denominator. `sequence` [M] as in `add_mismatch`, needed when `settings.whole_sequences`.
    """
    weights = None
    if settings.mismatch_correction != "none":
        low, high = settings.mismatch_bounds
        difference = old - gen
        if settings.importance_ratio == "sequence":
            difference = sequence_means(difference, _needed(sequence))[_needed(sequence)]
        ratio = torch.exp(difference)
        bounded = ratio.clamp(low, high)
        if settings.mismatch_correction == "tis":
            kept, weights = torch.isfinite(ratio), bounded
        elif settings.mismatch_correction == "icepop":
            kept, weights = ratio == bounded, bounded
        else:
            geometric = torch.exp(sequence_means(difference, _needed(sequence)))[_needed(sequence)]
            kept, weights = (geometric >= low) & (geometric <= high) & torch.isfinite(ratio), ratio
        weights = torch.where(kept, weights, torch.zeros_like(ratio))
    if settings.max_sequence_error is not None:
        error = sequence_means(torch.exp((old - gen).abs()), _needed(sequence))[_needed(sequence)]
        kept = (error <= settings.max_sequence_error).to(old.dtype)
        weights = kept if weights is None else weights * kept
    return weights


def borne_out(old: torch.Tensor, gen: torch.Tensor, tolerance: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[M] bool: whether the weights bear out what was recorded of the token's whole sequence.

    That is: the mean of abs(old − gen) over its tokens, of at least `FEWEST_TOKENS`, is at most its tolerance ([M], in nats).
    A tolerance of 0 is none, and true.
    """
    count = int(sequence.max()) + 1
    zeros = torch.zeros(count, dtype=torch.float64, device=old.device)
    totals = zeros.index_add(0, sequence, (old - gen).abs().double())
    tokens = zeros.index_add(0, sequence, torch.ones_like(old, dtype=torch.float64)).clamp(min=FEWEST_TOKENS)
    limit = zeros.scatter(0, sequence, tolerance.double())
    return ((limit == 0) | (totals <= limit * tokens))[sequence]


def add_correction(
    sums: MetricSums, old: torch.Tensor, gen: torch.Tensor, settings: LossSettings, sequence: torch.Tensor
) -> None:
    """Add how many tokens and sequences the correction takes out; arguments as in `add_mismatch`."""
    weights = correction_weights(old, gen, settings, sequence)
    if weights is None:
        return
    sums.add("correction_dropped", (weights == 0).double())
    sums.add("correction_nonfinite", (~torch.isfinite(torch.exp(old - gen))).double())
    sums.add("num_masked_seqs", (sequence_means(weights.double(), sequence) == 0).double())


def sequence_means(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[n] mean over each sequence's tokens."""
    length = int(sequence.max()) + 1
    totals = torch.zeros(length, dtype=values.dtype, device=values.device).index_add(0, sequence, values)
    counts = torch.zeros_like(totals).index_add(0, sequence, torch.ones_like(values))
    return totals / counts


def _needed(sequence: torch.Tensor | None) -> torch.Tensor:
    if sequence is None:
        raise ValueError("a correction of whole sequences needs the sequence of each token")
    return sequence


def _k3(x: torch.Tensor) -> torch.Tensor:
    return torch.expm1(x) - x
