"""What of a loss batch the Tinker API can compute, and as what.

Invariant: what is sent has exactly the gradient that the in-process engine computes, or it is refused by name. Tinker sums its
losses over tokens and normalises nothing, so the scale and the weight of a token go into its advantage (or weight), which is
exact as long as their product is not negative:

    clipped        ppo                   −Σ min(A′·r, A′·clamp(r, 1 − clip_low, 1 + clip_high)),  A′ = scale·policy_weight·A
    cispo          cispo                 −Σ stop(clamp(r, …)) · A′ · cur
    first update   importance_sampling   −Σ A′ · r; r is 1 there, so that no clip acts
    cross-entropy  cross_entropy         −Σ scale · cross_entropy_weight · cur

A datum is a sequence without its last token, and its targets without the first: target i is what input i predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from roundhouse.errors import ConfigError, DataError
from roundhouse.training.algorithms import LossSettings
from roundhouse.training.loss import borne_out
from roundhouse.training.service.verbs import LossBatch, TokenBatch

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]


@dataclass(frozen=True, slots=True)
class PlainDatum:
    """One sequence for Tinker, in plain arrays of n − 1 values."""

    tokens: np.ndarray
    """int32: the input."""
    loss_inputs: dict[str, np.ndarray]
    """target_tokens int64; weights, or logprobs and advantages, float32."""


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    """A loss function of Tinker's, with its inputs."""

    name: LossName
    config: dict[str, float]
    datums: list[PlainDatum]


def scoring(batch: TokenBatch) -> TinkerLoss:
    """What asks for log-probabilities only."""
    return TinkerLoss("cross_entropy", {}, _datums(batch, weights=batch.predicted.astype(np.float32)))


def translate(batch: LossBatch, old_logprobs: np.ndarray) -> TinkerLoss:
    """The batch as one of Tinker's losses; `old_logprobs` [T] are `batch.old_logprobs`, or those just computed in their place.

    Raises:
        ConfigError: the loss has a part that Tinker's API has no function for.
        DataError: a weight is negative.
    """
    columns = batch.columns
    for name, key in (("reference_kl_weights", "kl_coefficient"), ("entropy_weights", "entropy_coefficient")):
        if getattr(columns, name).any():
            raise ConfigError(
                f"The batch has {name}, for which the Tinker API has no term. Set train.algorithm.{key} to 0, or use another "
                "train.service.kind."
            )
    if batch.tolerance is not None:  # scale 0 in the sequences that the weights do not bear out
        scale, chosen = batch.scale.copy(), np.flatnonzero(batch.tokens.predicted)
        owner = np.repeat(np.arange(len(batch.tokens)), np.diff(batch.tokens.offsets))
        columns_T = (old_logprobs, batch.gen_logprobs, batch.tolerance, owner)
        scale[chosen] *= borne_out(*(torch.from_numpy(values[chosen]) for values in columns_T)).numpy()
        batch = replace(batch, scale=scale)
    if columns.cross_entropy_weights.any():
        if columns.policy_weights.any():
            raise ConfigError(
                "The batch has policy weights and cross-entropy weights; the Tinker API computes one loss a call. Train with "
                "train.service.kind resident, ray, process or remote, or with one of the two alone."
            )
        return TinkerLoss(
            "cross_entropy", {}, _datums(batch.tokens, weights=_product(batch, columns.cross_entropy_weights))
        )
    loss, config = _policy_loss(batch.loss, first=batch.old_logprobs is None)
    advantages = _product(batch, columns.policy_weights) * columns.advantages
    return TinkerLoss(loss, config, _datums(batch.tokens, logprobs=old_logprobs, advantages=advantages))


def loss_value(loss: TinkerLoss, log_probs: np.ndarray, batch: TokenBatch) -> float:
    """The loss at these log-probabilities ([T]), by the formulas above."""
    total, offset = 0.0, batch.offsets
    for index, datum in enumerate(loss.datums):
        cur = log_probs[offset[index] + 1 : offset[index + 1]].astype(np.float64)
        given = {name: values.astype(np.float64) for name, values in datum.loss_inputs.items()}
        if loss.name == "cross_entropy":
            total -= float((given["weights"] * cur).sum())
            continue
        ratio, advantages = np.exp(cur - given["logprobs"]), given["advantages"]
        low, high = loss.config.get("clip_low_threshold", 0.0), loss.config.get("clip_high_threshold", np.inf)
        clamped = np.clip(ratio, low, high)
        if loss.name == "cispo":
            total -= float((clamped * advantages * cur).sum())
        else:
            total -= float(np.minimum(advantages * ratio, advantages * clamped).sum())
    return total


def _policy_loss(settings: LossSettings, *, first: bool) -> tuple[LossName, dict[str, float]]:
    refused = {
        "dual_clip": settings.dual_clip is not None and not first,
        "mismatch_correction": settings.mismatch_correction != "none",
        "max_sequence_error": settings.max_sequence_error is not None,
        "importance_ratio": settings.importance_ratio != "token",
        "policy_loss": settings.policy_loss not in ("clipped", "cispo"),
    }
    if named := [name for name, unfit in refused.items() if unfit]:
        values = ", ".join(f"{name} {getattr(settings, name)!r}" for name in named)
        raise ConfigError(
            f"The Tinker API has no loss with {values}. Known there are the clipped loss and cispo with token ratios and no "
            "correction; train.service.kind resident, ray, process and remote know the rest."
        )
    bounds = {"clip_low_threshold": 1 - settings.clip_low, "clip_high_threshold": 1 + settings.clip_high}
    if settings.policy_loss == "cispo":
        return "cispo", bounds
    return ("importance_sampling", {}) if first else ("ppo", bounds)


def _product(batch: LossBatch, weights: np.ndarray) -> np.ndarray:
    product = batch.scale * weights
    if (product < 0).any():
        raise DataError(
            "A token's weight is negative: it cannot be moved into the advantage without turning the clip around."
        )
    return product


def _datums(batch: TokenBatch, **columns: np.ndarray) -> list[PlainDatum]:
    """The sequences with these [T] columns; values of tokens that are not predicted become 0."""
    datums = []
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        predicted = batch.predicted[start + 1 : stop]
        inputs = {
            name: np.where(predicted, values[start + 1 : stop], 0).astype(np.float32)
            for name, values in columns.items()
        }
        targets = batch.token_ids[start + 1 : stop].astype(np.int64)
        datums.append(PlainDatum(batch.token_ids[start : stop - 1], {"target_tokens": targets, **inputs}))
    return datums
