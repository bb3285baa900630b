"""The token loss, in formulas. All tensors are [M]: one value for each trained token, no padding, no mask.

Invariant: every token's term is multiplied by a `scale` that was computed from the counts of the whole update, so the sum
over microbatches, however they were cut, is exactly the loss of the update, and so are its gradients.

    cur  log-probability under the weights being trained (carries the gradient)
    old  the same before the first update of the iteration, a constant
    gen  the engine's, from when the token was sampled
    ref  the frozen reference's
    A    advantage

    r      = exp(cur − old)
    policy = max(−A·r, −A·clamp(r, 1 − clip_low, 1 + clip_high))     PPO's clipped surrogate (arXiv 1707.06347), with
                                                                     independent bounds (DAPO, 2503.14476)
    policy = min(policy, −A·dual_clip)        where A < 0            dual clip (1912.09729)
    total  = Σ scale · (policy_weight · w · policy + kl_weight · KL − entropy_weight · H)

with w the mismatch correction (`mismatch.correction_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from roundhouse.training.algorithm import LossSettings
from roundhouse.training.metrics import MetricSums
from roundhouse.training.mismatch import correction_weights

KL_INPUT_CLAMP = 20.0
KL_OUTPUT_CLAMP = 10.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of a microbatch; every tensor is [M] float32."""

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


def token_loss(tokens: Tokens, settings: LossSettings, sums: MetricSums) -> tuple[torch.Tensor, torch.Tensor]:
    """The microbatch's share of the update's loss, and of its policy term (detached), both scalars.

    Statistics over tokens go to `sums`.
    """
    ratio = torch.exp(tokens.cur - tokens.old)
    policy = clipped_policy_loss(ratio, tokens.advantages, settings)
    weights = tokens.scale * tokens.policy_weights
    correction = correction_weights(tokens.old, tokens.gen, settings.mismatch_correction, settings.mismatch_bounds)
    if correction is not None:
        weights = weights * correction
    policy_term = (weights * policy).sum()
    total = policy_term
    if tokens.ref is not None and tokens.kl_weights is not None:
        kl = reference_kl(tokens.cur, tokens.ref, settings.kl_estimator)
        total = total + (tokens.scale * tokens.kl_weights * kl).sum()
        sums.add("kl_penalty", kl)
    if tokens.entropy is not None and tokens.entropy_weights is not None:
        total = total - (tokens.scale * tokens.entropy_weights * tokens.entropy).sum()
        sums.add("entropy", tokens.entropy)
    _add_ratio_statistics(sums, ratio.detach(), tokens, settings)
    return total, policy_term.detach()


def clipped_policy_loss(ratio: torch.Tensor, advantages: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    """Clipped surrogate per token, to be minimised."""
    clamped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clamped)
    if settings.dual_clip is not None:
        bounded = torch.minimum(loss, -advantages * settings.dual_clip)
        loss = torch.where(advantages < 0, bounded, loss)
    return loss


def reference_kl(cur: torch.Tensor, ref: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """KL(policy ‖ reference) per token, estimated from the sampled token, with d = ref − cur clamped to ±20:

        k1 = −d        k2 = d²/2        k3 = exp(d) − 1 − d        (Schulman 2020), each clamped to ±10

    The gradient is that of the estimator's expectation under the policy: the value is multiplied by exp(cur − stop(cur)),
    which is 1 and adds the score-function term. Without it k1 has no gradient on average and k3 has that of another
    divergence. Where a clamp acts, its side of the gradient is zero; where the one on d acts, so is the score term.
    """
    difference = ref - cur
    d = difference.clamp(-KL_INPUT_CLAMP, KL_INPUT_CLAMP)
    if estimator == "k1":
        kl = -d
    elif estimator == "k2":
        kl = d.square() / 2
    else:
        kl = torch.expm1(d) - d
    score = torch.exp(cur - cur.detach())
    score = torch.where(difference.abs() > KL_INPUT_CLAMP, score.detach(), score)
    return score * kl.clamp(-KL_OUTPUT_CLAMP, KL_OUTPUT_CLAMP)


def sequence_scale(trained_tokens: torch.Tensor, aggregation: Literal["token", "sequence"]) -> torch.Tensor:
    """[n] factor of the tokens of each of an update's sequences, so that the update's sum becomes a mean.

    Args:
        trained_tokens: [n] trained tokens of each sequence, all positive.
        aggregation: token: 1 / (all trained tokens), the mean over tokens.
            sequence: 1 / (n · trained tokens of this sequence), the mean over sequences of their token means.
    """
    if aggregation == "token":
        return torch.ones_like(trained_tokens, dtype=torch.float32) / trained_tokens.sum()
    return 1.0 / (trained_tokens * len(trained_tokens)).float()


def _add_ratio_statistics(sums: MetricSums, ratio: torch.Tensor, tokens: Tokens, settings: LossSettings) -> None:
    clamped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    cur = tokens.cur.detach()
    sums.add("probs_ratio", ratio)
    sums.add("probs_ratio_clamped", clamped)
    sums.add("probs_ratio_min", ratio)
    sums.add("probs_ratio_max", ratio)
    sums.add("clip_fraction", (-tokens.advantages * clamped > -tokens.advantages * ratio).float())
    sums.add("approx_entropy", -torch.exp(cur - tokens.gen) * cur)
