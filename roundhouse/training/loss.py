"""The token loss, in formulas. All tensors are [M]: one value per trained token, without padding or mask.

Invariant: every token's term is multiplied by a `scale` computed from the counts of the whole update, so the sum over
microbatches, however they are cut, is exactly the loss of the update, and so are its gradients.

    cur  log-probability under the weights being trained (carries the gradient)
    old  the same before the first update of the iteration, a constant
    gen  the engine's, from when the token was sampled
    ref  the frozen reference's
    A    advantage

    r      = exp(cur − old); for GSPO (2507.18071) the exp of its mean log over the sequence's trained tokens;
             forced on-policy: exp(cur − stop(cur)), 1 with a gradient. The exponent is clamped to ±20
    rc     = clamp(r, 1 − clip_low, 1 + clip_high)      independent bounds (DAPO, 2503.14476)

    clipped    policy = max(−A·r, −A·rc)                PPO's surrogate (1707.06347)
               policy = min(policy, −A·dual_clip)       for A < 0 (1912.09729)
    cispo      policy = −A · stop(rc) · cur             (MiniMax-M1, 2506.13585)
    reinforce  policy = −A · cur

    total  = Σ scale · (policy_weight · w · policy + cross_entropy_weight · (−cur) + kl_weight · KL − entropy_weight · H)

with w the mismatch correction (`correction_weights`). Mismatch statistics compare engine and trainer (`old`) on the
same weights and trained tokens, so a failed refit shows here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from roundhouse import plugins
from roundhouse.config.algorithms import AGREEMENT, Aggregation, loss_traits
from roundhouse.errors import ConfigError
from roundhouse.imports import load_function
from roundhouse.training.algorithms import LossSettings
from roundhouse.training.metrics import METRICS, Denominator
from roundhouse.trajectories.schemas import FEWEST_TOKENS


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
    """Return the per-token weight w of the policy loss from the ratio exp(old − gen); None without a correction.

        tis            w = clamp(ratio, bounds): truncated importance sampling
        icepop         w = ratio inside the bounds, else 0
        auto           as tis in sequences with a mean of abs(old − gen) above `AGREEMENT`, else 1
        seq-mask-tis   w = ratio in sequences with a geometric mean of the ratio inside the bounds, else 0

    With a ratio of whole sequences (GSPO), the correction's is the geometric mean over the sequence too: a product
    grows with the length, and rounding alone would reach a bound in a long sequence. A ratio that is not finite becomes
    0, as does every token of a sequence with a mean of exp(abs(old − gen)) above `max_sequence_error`. A token of
    weight 0 still counts in the loss' denominator. `sequence` [M] as in `add_mismatch`, needed when
    `settings.whole_sequences`.
    """
    weights = None
    if settings.mismatch_correction != "none":
        low, high = settings.mismatch_bounds
        difference = old - gen
        if settings.importance_ratio == "sequence":
            difference = sequence_means(difference, _needed(sequence))[_needed(sequence)]
        ratio = torch.exp(difference)
        bounded = ratio.clamp(low, high)
        if settings.mismatch_correction in ("tis", "auto"):
            in_bounds, weights = torch.isfinite(ratio), bounded
        elif settings.mismatch_correction == "icepop":
            in_bounds, weights = ratio == bounded, bounded
        else:
            geometric = torch.exp(sequence_means(difference, _needed(sequence)))[_needed(sequence)]
            in_bounds, weights = (geometric >= low) & (geometric <= high) & torch.isfinite(ratio), ratio
        weights = torch.where(in_bounds, weights, torch.zeros_like(ratio))
        if settings.mismatch_correction == "auto":
            agrees = (sequence_means((old - gen).abs(), _needed(sequence)) <= AGREEMENT)[_needed(sequence)]
            weights = torch.where(agrees, torch.ones_like(ratio), weights)
    if settings.max_sequence_error is not None:
        error = sequence_means(torch.exp((old - gen).abs()), _needed(sequence))[_needed(sequence)]
        in_bounds = (error <= settings.max_sequence_error).to(old.dtype)
        weights = in_bounds if weights is None else weights * in_bounds
    return weights


def borne_out(old: torch.Tensor, gen: torch.Tensor, tolerance: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Return [M] bool: whether the weights confirm the recorded log-probabilities of the token's whole sequence.

    The mean of abs(old − gen) over its tokens, of at least `FEWEST_TOKENS`, must be at most its tolerance ([M], in
    nats). A tolerance of 0 means no bound.
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
    if settings.mismatch_correction == "auto":
        sums.add("num_corrected_seqs", (sequence_means((old - gen).abs().double(), sequence) > AGREEMENT).double())
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


LOG_RATIO_CLAMP = 20.0
"""Bound of a ratio's logarithm, as in verl and SkyRL. Beyond it a ratio is meaningless: exp of 89 is infinite, and its
gradient NaN even if the clip removes it."""
KL_INPUT_CLAMP = 20.0
KL_OUTPUT_CLAMP = 10.0
KL_WEIGHT_BOUND = 2.0
"""Bound of the KL term's importance weight, equal to that of truncated importance sampling (`tis`) for the policy
term."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The trained tokens of a microbatch, of whole sequences; every tensor is [M] float32."""

    cur: torch.Tensor
    old: torch.Tensor
    """A constant. In an iteration's first update it equals cur, and the ratio is 1 with a gradient."""
    gen: torch.Tensor
    advantages: torch.Tensor
    policy_weights: torch.Tensor
    scale: torch.Tensor
    ref: torch.Tensor | None = None
    kl_weights: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    """Entropy of the distribution that the token was drawn from; carries a gradient."""
    entropy_weights: torch.Tensor | None = None
    cross_entropy_weights: torch.Tensor | None = None
    """None for an algorithm without cross-entropy."""
    sequence: torch.Tensor | None = None
    """int64: a number for each token's sequence, any numbers; needed with `LossSettings.whole_sequences` or `tolerance`."""
    tolerance: torch.Tensor | None = None
    """Tolerance of the token's sequence (`borne_out`): every term of a contradicted sequence is 0."""


def token_loss(tokens: LossTokens, settings: LossSettings, sums: MetricSums) -> tuple[torch.Tensor, torch.Tensor]:
    """The microbatch's share of the update's loss, and of its policy term (detached), both scalars.

    Statistics over tokens go to `sums`.
    """
    sequence = None
    if (settings.whole_sequences or tokens.tolerance is not None) and tokens.sequence is not None:
        sequence = torch.unique(tokens.sequence, return_inverse=True)[1]
    ratio, scale = importance_ratio(tokens, settings, sequence), tokens.scale
    if tokens.tolerance is not None and sequence is not None:
        scale = scale * borne_out(tokens.old, tokens.gen, tokens.tolerance, sequence)
    weights = scale * tokens.policy_weights
    correction = correction_weights(tokens.old, tokens.gen, settings, sequence)
    if correction is not None:
        weights = weights * correction
    policy_term = (weights * policy_loss(tokens, ratio, settings)).sum()
    total = policy_term
    if tokens.cross_entropy_weights is not None:
        total = total - (scale * tokens.cross_entropy_weights * tokens.cur).sum()
        sums.add("nll", -tokens.cur[tokens.cross_entropy_weights != 0])
    if tokens.ref is not None and tokens.kl_weights is not None:
        gen = tokens.gen if settings.kl_importance_weighting else None
        kl = reference_kl(tokens.cur, tokens.ref, settings.kl_estimator, gen)
        total = total + (scale * tokens.kl_weights * kl).sum()
        sums.add("kl_penalty", kl)
    if tokens.entropy is not None and tokens.entropy_weights is not None:
        total = total - (scale * tokens.entropy_weights * tokens.entropy).sum()
        sums.add("entropy", tokens.entropy)
    _add_ratio_statistics(sums, ratio.detach(), tokens, settings)
    return total, policy_term.detach()


def importance_ratio(tokens: LossTokens, settings: LossSettings, sequence: torch.Tensor | None) -> torch.Tensor:
    """[M] policy ratio r; `sequence` [M] numbers the sequences from 0 without gaps, needed for ratios of whole sequences."""
    if settings.importance_ratio == "on_policy":
        return torch.exp(tokens.cur - tokens.cur.detach())
    difference = tokens.cur - tokens.old
    if settings.importance_ratio == "sequence":
        if sequence is None:
            raise ValueError("importance_ratio sequence needs the sequence of each token")
        difference = sequence_means(difference, sequence)[sequence]
    return torch.exp(difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))


def policy_loss(tokens: LossTokens, ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """[M] policy term per token, to be minimised.

    The function that `settings.policy_loss` names is called with the same tokens, ratio [M] and settings, and returns the same.

    Raises:
        ConfigError: that function returns another shape.
    """
    terms: torch.Tensor = loss_function(settings.policy_loss)(tokens, ratio, settings)
    if terms.shape != ratio.shape:
        raise ConfigError(
            f"train.algorithm.policy_loss is {settings.policy_loss!r}, which gives the shape {tuple(terms.shape)} for "
            f"{len(ratio)} tokens. Return one term for each of them, not their sum: the trainer makes the mean."
        )
    return terms


def loss_function(name: str) -> Callable[[LossTokens, torch.Tensor, LossSettings], torch.Tensor]:
    """Return the function that `policy_loss` names: a plug-in, or `module:function`.

    Raises:
        ConfigError: it cannot be imported.
    """
    chosen: Callable[[LossTokens, torch.Tensor, LossSettings], torch.Tensor] = (
        load_function(name, "train.algorithm.policy_loss") if ":" in name else plugins.factory("loss", name)
    )
    return chosen


def reinforce_loss(tokens: LossTokens, ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """Return −A · cur for each token."""
    return -tokens.advantages * tokens.cur


def cispo_loss(tokens: LossTokens, ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """Return the log-probability weighted by the advantage and the clipped ratio, which carries no gradient."""
    return -tokens.advantages * _clamped(ratio, settings).detach() * tokens.cur


def clipped_loss(tokens: LossTokens, ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """Return PPO's clipped surrogate for each token."""
    return clipped_policy_loss(ratio, tokens.advantages, settings)


def clipped_policy_loss(ratio: torch.Tensor, advantages: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """Clipped surrogate per token, to be minimised."""
    loss = torch.maximum(-advantages * ratio, -advantages * _clamped(ratio, settings))
    if settings.dual_clip is not None:
        bounded = torch.minimum(loss, -advantages * settings.dual_clip)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss


def value_loss(
    values: torch.Tensor,
    old: torch.Tensor,
    returns: torch.Tensor,
    scale: torch.Tensor,
    clip: float | None,
    sums: MetricSums,
) -> torch.Tensor:
    """Return the critic's share of an update's loss, a scalar; arguments [M], of which `values` carries the gradient.

        ½ · max((V − R)², (old + clamp(V − old, ±clip) − R)²)          (PPO's code and TRL's PPOTrainer); ½ · (V − R)² without

    The gradient of a token is 0 if its prediction has moved by more than `clip` towards its return.
    """
    terms = (values - returns).square()
    if clip is not None:
        moved = values - old
        bounded = torch.where(moved.abs() > clip, old + moved.clamp(-clip, clip), values)  # exact if nothing is clipped
        clipped = (bounded - returns).square()
        sums.add("value_clip_fraction", (clipped > terms).float())
        terms = torch.maximum(terms, clipped)
    sums.add("value_loss", terms / 2)
    return (scale * terms / 2).sum()


def reference_kl(
    cur: torch.Tensor, ref: torch.Tensor, estimator: Literal["k1", "k2", "k3"], gen: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(policy ‖ reference) per token, estimated from the sampled token, with d = ref − cur clamped to ±20:

        k1 = −d        k2 = d²/2        k3 = exp(d) − 1 − d        (Schulman 2020), each clamped to ±10

    The gradient is that of the estimator's expectation under the policy: the value is multiplied by exp(cur −
    stop(cur)), which is 1 and adds the score-function term. Without it the gradient of k1 is 0 on average and that of
    k3 is another divergence's. With `gen`, the factor is exp(cur − gen), at most `KL_WEIGHT_BOUND`: the expectation is
    then over tokens that an older policy sampled. On an active clamp's side the gradient is zero; an active clamp of d
    also zeroes the factor's.
    """
    difference = ref - cur
    d = difference.clamp(-KL_INPUT_CLAMP, KL_INPUT_CLAMP)
    if estimator == "k1":
        kl = -d
    elif estimator == "k2":
        kl = d.square() / 2
    else:
        kl = torch.expm1(d) - d
    factor = torch.exp((cur - (cur.detach() if gen is None else gen)).clamp(max=math.log(KL_WEIGHT_BOUND)))
    factor = torch.where(difference.abs() > KL_INPUT_CLAMP, factor.detach(), factor)
    return factor * kl.clamp(-KL_OUTPUT_CLAMP, KL_OUTPUT_CLAMP)


def sequence_scale(
    trained_tokens: torch.Tensor,
    aggregation: Aggregation,
    *,
    rollouts: torch.Tensor | None = None,
    fixed_length: int | None = None,
) -> torch.Tensor:
    """[n] factor of the tokens of each of an update's sequences, so that the update's sum becomes a mean.

        token          1 / (all trained tokens): the mean over tokens
        sequence       1 / (n · trained tokens of this sequence): the mean over sequences of their token means
        rollout        1 / (rollouts · sequences of this rollout · trained tokens of this sequence): the mean over rollouts of
                       the means over their sequences, so that a rollout counts once however often it was split
        fixed_length   1 / (rollouts · fixed_length): the sum over tokens, the same for short and long (Dr. GRPO, 2503.20783)

    Args:
        trained_tokens: [n] trained tokens of each sequence, all positive.
        rollouts: [n] int64, a number for each sequence's rollout; None: each sequence is a rollout.
    """
    if aggregation == "token":
        return torch.ones_like(trained_tokens, dtype=torch.float32) / trained_tokens.sum()
    if aggregation == "sequence":
        return 1.0 / (trained_tokens * len(trained_tokens)).float()
    count, siblings = len(trained_tokens), torch.ones_like(trained_tokens)
    if rollouts is not None:
        _, index, sizes = torch.unique(rollouts, return_inverse=True, return_counts=True)
        count, siblings = len(sizes), sizes[index]
    if aggregation == "rollout":
        return 1.0 / (trained_tokens * siblings * count).float()
    if fixed_length is None:
        raise ValueError("aggregation fixed_length needs fixed_length")
    return torch.full((len(trained_tokens),), 1.0 / (count * fixed_length))


def _clamped(ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    return ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)


def _add_ratio_statistics(sums: MetricSums, ratio: torch.Tensor, tokens: LossTokens, settings: LossSettings) -> None:
    clamped = _clamped(ratio, settings)
    cur = tokens.cur.detach()
    sums.add("probs_ratio", ratio)
    sums.add("probs_ratio_clamped", clamped)
    sums.add("probs_ratio_min", ratio)
    sums.add("probs_ratio_max", ratio)
    clips = loss_traits(settings.policy_loss).clips
    if clips == "surrogate":
        sums.add("clip_fraction", (-tokens.advantages * clamped > -tokens.advantages * ratio).float())
    elif clips == "ratio":
        sums.add("clip_fraction", (clamped != ratio).float())
    sums.add("approx_entropy", -torch.exp(cur - tokens.gen) * cur)


@dataclass(frozen=True, slots=True)
class Share:
    """Contribution of a part of the work to a metric."""

    value: float
    """A sum over units of the denominator, or an extreme."""
    count: int
    """Units in the sum; 0 for an extreme."""


class MetricSums:
    """Adds up metrics over microbatches without leaving the device; `values` and `shares` read them once."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        self._extremes: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add a metric's values, one for each unit of its denominator, or candidates for its extreme."""
        values = values.detach()
        kind = METRICS[name].denominator
        if kind in (Denominator.MAX, Denominator.MIN):
            new = values.max() if kind is Denominator.MAX else values.min()
            merge = torch.maximum if kind is Denominator.MAX else torch.minimum
            old = self._extremes.get(name)
            self._extremes[name] = new if old is None else merge(old, new)
            return
        total, count = self._sums.get(name, (torch.zeros((), dtype=torch.float64, device=values.device), 0))
        self._sums[name] = (total + values.sum(dtype=torch.float64), count + values.numel())

    def shares(self) -> dict[str, Share]:
        """Every metric so far, to be merged elsewhere."""
        sums = {name: Share(float(total), count) for name, (total, count) in self._sums.items() if count}
        return sums | {name: Share(float(value), 0) for name, value in self._extremes.items()}

    def merge(self, shares: dict[str, Share]) -> None:
        """Add what another part of the work found."""
        for name, share in shares.items():
            value = torch.tensor(share.value, dtype=torch.float64)
            if share.count == 0:
                self.add(name, value)
                continue
            total, count = self._sums.get(name, (torch.zeros((), dtype=torch.float64), 0))
            self._sums[name] = (total + value.to(total.device), count + share.count)

    def values(self) -> dict[str, float]:
        """Every metric as a number."""
        means = {
            name: float(total) if METRICS[name].denominator is Denominator.SUM else float(total) / count
            for name, (total, count) in self._sums.items()
            if count
        }
        return means | {name: float(value) for name, value in self._extremes.items()}
