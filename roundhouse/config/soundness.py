"""Which settings can be right when rollouts may be older than the policy that trains on them.

Invariant: a configuration that passes has, for every token that may be stale, a bounded weight that corrects for the policy
that sampled it, or a loss that needs none. The bound is one of the token's weight, or (seq-mask-tis, GSPO) of the geometric
mean over its sequence; the KL term's is `roundhouse.training.loss.KL_WEIGHT_BOUND`.

Where staleness comes in. The trainer computes `old` under the weights that it begins the step from; the engine sampled under
older ones. The policy's ratio exp(cur - old) does not see that lag; only the mismatch correction's exp(old - gen) does. In a
rollout that spans a refit, exp(old - gen) is right token by token: each token's `gen` is of the version that sampled it.

    setting                            because
    mismatch_correction: none          the gradient is that of another distribution's samples, whatever the clip
    seq-mask-tis with its defaults     0.999 to 1.002 is for rounding; a version of lag takes out nearly everything
    importance_ratio: on_policy        it stands for cur = old = gen
    KL in the loss, unweighted         estimates the KL from tokens that the policy did not sample
    rollout.dynamic_sampling           which groups an iteration has is known only after they were rolled out

Not refused: cross_entropy, which learns from chosen rollouts whoever wrote them; `validation.recompute_tolerance`, which judges
only sequences of the version that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundhouse.config.asynchrony import Asynchrony
from roundhouse.config.objectives import PolicyGradient, TokenLoss
from roundhouse.errors import ConfigError

if TYPE_CHECKING:
    from roundhouse.config.models import RunConfig

DEFAULT_CORRECTION = "tis"
"""What corrects where staleness is possible and nothing was chosen: truncated importance sampling, which drops no token."""
_WIDEST_ROUNDING = 1.05
"""Upper bounds of a sequence's mean ratio below this are meant for rounding, not for other weights."""


@dataclass(frozen=True, slots=True)
class Unsound:
    """A setting that cannot be right."""

    key: str
    value: object
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key} is {self.value}: {self.why} {self.remedy}"


def unsound(asynchrony: Asynchrony, config: RunConfig) -> list[Unsound]:
    """Everything that cannot be right of a run's configuration under this asynchrony; empty with staleness 0."""
    if asynchrony.staleness == 0:
        return []
    algorithm, found = config.train.algorithm, []
    bound = f"asynchrony.staleness is {asynchrony.staleness}"
    if isinstance(algorithm, PolicyGradient):
        found += _of_the_loss(algorithm, bound)
    if algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss" and not algorithm.kl_importance_weighting:
        found.append(
            Unsound(
                "train.algorithm.kl_importance_weighting",
                False,
                f"{bound}, and the KL term's tokens were sampled by older weights, so its estimate is biased.",
                "Set it to true, or kl_coefficient to 0.",
            )
        )
    if config.rollout.dynamic_sampling is not None:
        found.append(
            Unsound(
                "rollout.dynamic_sampling",
                "set",
                "an iteration's groups have to be known before they are rolled out, or quick groups would be preferred;",
                "unset it, or set asynchrony.staleness to 0.",
            )
        )
    return found


def refuse_unsound(asynchrony: Asynchrony, config: RunConfig) -> None:
    """Refuse a combination that cannot be right.

    Raises:
        ConfigError: names each key, its value and what to set instead.
    """
    if found := unsound(asynchrony, config):
        lines = "\n".join(f"  {item}" for item in found)
        raise ConfigError(
            f"Rollouts may be {asynchrony.staleness} versions old. These settings cannot be right then:\n{lines}"
        )


def with_correction(asynchrony: Asynchrony, config: RunConfig) -> RunConfig:
    """The configuration with `DEFAULT_CORRECTION`, where rollouts may be stale and nobody chose a correction.

    A correction that was set stays, `none` too: that is then refused, and not replaced behind the user's back.
    """
    algorithm = config.train.algorithm
    chosen = "mismatch_correction" in algorithm.model_fields_set
    if asynchrony.staleness == 0 or not isinstance(algorithm, PolicyGradient) or chosen:
        return config
    if algorithm.mismatch_correction != "none":
        return config
    corrected = algorithm.model_copy(update={"mismatch_correction": DEFAULT_CORRECTION})
    return config.model_copy(update={"train": config.train.model_copy(update={"algorithm": corrected})})


def _of_the_loss(algorithm: PolicyGradient, bound: str) -> list[Unsound]:
    found = []
    correction, (_, high) = algorithm.mismatch_correction, algorithm.bounds
    if correction == "none":
        found.append(
            Unsound(
                "train.algorithm.mismatch_correction",
                correction,
                f"{bound}, and nothing corrects for the older weights that sampled the tokens.",
                f"Set it to {DEFAULT_CORRECTION} (or icepop, which drops tokens instead of bounding their weight).",
            )
        )
    elif correction == "seq-mask-tis" and high < _WIDEST_ROUNDING:
        found.append(
            Unsound(
                "train.algorithm.mismatch_bounds",
                list(algorithm.bounds),
                f"{bound}: bounds so close to 1 are for rounding between engine and trainer, and would mask nearly every "
                "sequence that is a version old.",
                "Set them, [0.8, 1.25] for example, or mismatch_correction to tis.",
            )
        )
    if algorithm.importance_ratio == "on_policy":
        found.append(
            Unsound(
                "train.algorithm.importance_ratio",
                algorithm.importance_ratio,
                f"{bound}, and it says that the policy that trains has sampled.",
                "Set it to token, or asynchrony.staleness to 0.",
            )
        )
    return found


def unsound_for_old_samples(algorithm: TokenLoss | Any) -> list[str]:
    """What of an algorithm cannot be right for tokens that another policy sampled: key, value, reason and remedy a line.

    Cross-entropy learns from chosen rollouts, whoever wrote them.
    """
    if not isinstance(algorithm, TokenLoss):
        return []
    found = []
    if isinstance(algorithm, PolicyGradient):
        correction, bounds = algorithm.mismatch_correction, algorithm.bounds
        if correction == "none":
            found.append(
                "train.algorithm.mismatch_correction is none: nothing corrects for the policy that sampled the tokens. Set "
                "it to tis (or icepop, which drops tokens instead of bounding their weight)."
            )
        elif correction == "seq-mask-tis" and bounds[1] < _WIDEST_ROUNDING:
            found.append(
                f"train.algorithm.mismatch_bounds is {list(bounds)}, meant for rounding between engine and trainer: nearly "
                "every sequence would be masked. Set them, [0.8, 1.25] for example, or mismatch_correction to tis."
            )
        if algorithm.importance_ratio == "on_policy":
            found.append(
                "train.algorithm.importance_ratio is on_policy, which says that the policy that trains has sampled. Set it to "
                "token."
            )
    if algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss" and not algorithm.kl_importance_weighting:
        found.append(
            "train.algorithm.kl_importance_weighting is false, and the KL term's tokens were sampled by another policy, so its "
            "estimate is biased. Set it to true, or kl_coefficient to 0."
        )
    return found
