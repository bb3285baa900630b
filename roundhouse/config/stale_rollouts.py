"""Settings for rollouts of older versions.

Invariant: in an accepted configuration, each token that may be stale has a bounded weight that corrects for the sampling
policy, or a loss that needs no correction. The bound is on the token's weight, or (seq-mask-tis, GSPO) on the geometric mean
over its sequence; the bound of the KL term is `roundhouse.training.loss.KL_WEIGHT_BOUND`.

The trainer computes `old` with its initial weights, but the engine sampled with older ones. The ratio exp(cur - old) does not
contain that lag. Only the mismatch correction exp(old - gen) does, token by token, even across a refit.

    refused setting                    reason
    mismatch_correction: none, auto    the gradient belongs to the samples of another distribution, with any clip
    seq-mask-tis with its defaults     0.999 to 1.002 is for rounding; a version of lag removes nearly everything
    importance_ratio: on_policy        it means cur = old = gen
    KL in the loss, unweighted         estimates the KL from tokens that the policy did not sample
    rollout.dynamic_sampling, window   a round is judged after all of its groups; a window takes quick ones first

Accepted: cross_entropy, which learns from chosen rollouts of any policy, and `validation.recompute_tolerance`, which judges
only sequences of the version that trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundhouse.config.algorithms import UNCORRECTED, PolicyGradient, TokenLoss
from roundhouse.config.rollout import Asynchrony
from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig


DEFAULT_CORRECTION = "tis"
"""Default correction for possible staleness: truncated importance sampling, which drops no token."""

_WIDEST_ROUNDING = 1.05
"""Upper bounds of a sequence's mean ratio below this allow for rounding only, not for other weights."""


def unsound(asynchrony: Asynchrony, config: RunConfig) -> list[str]:
    """Return the faults of a configuration under this asynchrony; empty with staleness 0."""
    if asynchrony.staleness == 0:
        return []
    problems = unsound_for_old_samples(config.train.algorithm, f"asynchrony.staleness is {asynchrony.staleness}, and ")
    if config.rollout.dynamic_sampling is not None and asynchrony.window > 1:
        problems.append(
            f"rollout.dynamic_sampling is set: asynchrony.window is {asynchrony.window}, so that a step takes groups before "
            "slower ones of their round are complete, and whether a round has enough groups with spread is known only then. "
            "Unset it, or set asynchrony.mode to batch-async or fully-async and window to 1."
        )
    return problems


def refuse_unsound(asynchrony: Asynchrony, config: RunConfig) -> None:
    """Refuse a combination that trains on a wrong gradient.

    Raises:
        ConfigError: names each key, its value and the remedy.
    """
    if problems := unsound(asynchrony, config):
        lines = "\n".join(f"  {item}" for item in problems)
        raise ConfigError(
            f"Rollouts may be {asynchrony.staleness} versions old. These settings cannot be right then:\n{lines}"
        )


def with_correction(asynchrony: Asynchrony, config: RunConfig) -> RunConfig:
    """Return the configuration with `DEFAULT_CORRECTION` if rollouts may be stale and no correction is set.

    An explicit correction stays. An explicit `none` is refused later, not replaced.
    """
    algorithm = config.train.algorithm
    chosen = "mismatch_correction" in algorithm.model_fields_set
    if asynchrony.staleness == 0 or not isinstance(algorithm, PolicyGradient) or chosen:
        return config
    if algorithm.mismatch_correction not in UNCORRECTED:
        return config
    corrected = algorithm.model_copy(update={"mismatch_correction": DEFAULT_CORRECTION})
    return config.model_copy(update={"train": config.train.model_copy(update={"algorithm": corrected})})


def unsound_for_old_samples(algorithm: TokenLoss | Any, because: str = "") -> list[str]:
    """Return the settings of an algorithm that are wrong for tokens of another policy: key, value, reason and remedy per line.

    Cross-entropy is accepted: it learns from chosen rollouts of any policy.

    Args:
        because: reason for samples of another policy, as the beginning of the line.
    """
    if not isinstance(algorithm, TokenLoss):
        return []
    problems = []
    if isinstance(algorithm, PolicyGradient):
        correction, bounds = algorithm.mismatch_correction, algorithm.bounds
        if correction in UNCORRECTED:
            some = "nothing" if correction == "none" else "not every sequence"
            problems.append(
                f"train.algorithm.mismatch_correction is {correction}: {because}{some} is corrected for the policy that "
                f"sampled the tokens. Set it to {DEFAULT_CORRECTION} (or icepop, which drops tokens instead of bounding their "
                "weight)."
            )
        elif correction == "seq-mask-tis" and bounds[1] < _WIDEST_ROUNDING:
            problems.append(
                f"train.algorithm.mismatch_bounds is {list(bounds)}: {because}bounds so close to 1 are for rounding between "
                "engine and trainer, and would mask nearly every sequence of another policy. Set them, [0.8, 1.25] for "
                f"example, or mismatch_correction to {DEFAULT_CORRECTION}."
            )
        if algorithm.importance_ratio == "on_policy":
            problems.append(
                f"train.algorithm.importance_ratio is on_policy: {because}on_policy needs rollouts of the policy that trains. "
                "Set it to token."
            )
    if algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss" and not algorithm.kl_importance_weighting:
        problems.append(
            f"train.algorithm.kl_importance_weighting is False: {because}the KL term's tokens were sampled by another policy, "
            "so its estimate is biased. Set it to true, or kl_coefficient to 0."
        )
    return problems
