"""Algorithm of a run: the way from rewards to advantages (one section per algorithm), and the loss on tokens.

Invariant: a section checks its own keys; checks with other sections are in `config.checks`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from roundhouse import plugins
from roundhouse.config.kinds import Kinds
from roundhouse.config.secrets import Parameters
from roundhouse.config.section import (
    TARGET,
    Code,
    Consent,
    EnvironmentName,
    Fraction,
    PositiveFloat,
    PositiveInt,
    Section,
    Target,
    is_recorded,
)

Aggregation = Literal["token", "sequence", "rollout", "fixed_length"]
MismatchCorrection = Literal["auto", "none", "tis", "icepop", "seq-mask-tis"]
UNCORRECTED: tuple[MismatchCorrection, ...] = ("none", "auto")
"""Corrections that leave sequences of another policy as they are."""

AGREEMENT = 0.01
"""Nats a token, in a sequence's mean, up to which `mismatch_correction: auto` takes trainer and engine as equal. Two programs
in float32 differ by less than 1e-5, in bfloat16 by about this much."""
DEFAULT_BOUNDS: dict[str, tuple[float, float]] = {
    "auto": (0.0, 2.0),
    "tis": (0.0, 2.0),
    "seq-mask-tis": (0.999, 1.002),
}
"""Default of `mismatch_bounds`; (0.5, 5.0) for every unlisted correction. Truncation has no lower bound, which would
raise the weight of exactly the tokens that the policy has unlearnt."""


class AdaptiveKL(Section):
    """A KL coefficient that steers the measured KL to a target (Ziegler et al., arXiv 1909.08593, section 2.2).

    After each iteration: coefficient *= max(0.5, 1 + clip(KL / target - 1, -0.2, 0.2) * rollouts / horizon).
    """

    target: PositiveFloat = 0.1
    """Wanted KL of one token, in nats. Targets of about 6 in the literature are sums over an answer."""
    horizon: PositiveFloat = 10_000.0
    """Rollouts in which the coefficient can change by about a fifth."""


class Scaling(Section):
    """Rewards mapped linearly from a source range to a target range."""

    source: tuple[float, float] = (0.0, 1.0)
    target: tuple[float, float] = (-1.0, 1.0)
    outside: Literal["refuse", "clamp"] = "refuse"
    """Treatment of a reward outside of `source`. refuse: the step fails and names the sequence. clamp: it counts as
    the nearest bound."""

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name, (low, high) in (("source", self.source), ("target", self.target)):
            if not low < high:
                raise ValueError(f"{name} is [{low}, {high}], an empty range. Give the lower bound first.")
        return self


class OverlongShaping(Section):
    """A penalty that grows in the last tokens before a limit (DAPO, arXiv 2503.14476, equation 13).

    With n the tokens that the whole rollout generated: max(-penalty, min(0, (limit - buffer - n) / buffer * penalty)).
    """

    max_generated_tokens: PositiveInt
    """The limit, over all turns of a rollout."""
    buffer_tokens: PositiveInt = 128
    """Tokens before the limit over which the penalty grows from 0 to its full size."""
    penalty: PositiveFloat | None = None
    """Unset: half of the range of the rewards, so that a right answer at the limit still beats a wrong one. The range is
    `scaling.target`, or 0 to 1 without `scaling`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.buffer_tokens > self.max_generated_tokens:
            raise ValueError(
                f"buffer_tokens ({self.buffer_tokens}) is above max_generated_tokens ({self.max_generated_tokens}): every "
                "rollout would be penalised. Lower it."
            )
        return self


class RewardShaping(Section):
    """Changes to a reward before it becomes an advantage; the recorded reward and group spread stay the environment's.

    Order: scaling, the factor of truncated rollouts, the overlong penalty.
    """

    scaling: Scaling | None = None
    truncated_factor: Fraction | None = None
    """Multiplies the reward of a truncated rollout; 0 takes it away. Unset: 1."""
    overlong: OverlongShaping | None = None

    @property
    def overlong_penalty(self) -> float:
        """`overlong.penalty`, or its default for the range of the rewards."""
        if self.overlong is not None and self.overlong.penalty is not None:
            return self.overlong.penalty
        low, high = (0.0, 1.0) if self.scaling is None else self.scaling.target
        return (high - low) / 2

    @model_validator(mode="after")
    def _one_truncation_rule(self) -> Self:
        if self.truncated_factor is not None and self.overlong is not None:
            raise ValueError(
                f"truncated_factor ({self.truncated_factor}) and overlong both punish length. Unset one of them."
            )
        return self


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then constant or falling to a share of the full rate; of the policy and of a critic."""

    learning_rate: PositiveFloat = 3e-4
    """Unset, in a run: 3e-4 for the small policy of `policy.kind: warm_start`, 1e-6 for a pretrained one, 1e-5 for an adapter
    of it (`train.lora`, Tinker)."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps, counted over the whole run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps from the end of the warm-up until the rate has fallen; needed unless the schedule is constant."""
    final_share: Fraction = 0.1
    """The share of the full rate at which a falling schedule ends and stays."""
    max_grad_norm: PositiveFloat = 1.0
    moments: Literal["float32", "8-bit"] = "float32"
    """Number format of AdamW's two moments. 8-bit (arXiv:2110.02861) takes 2.1 bytes per parameter of a matrix instead
    of 8, with a scale for each 128 numbers; it needs torchao (extra `torchao`). It cannot change during a run."""

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        if (self.schedule == "constant") != (self.decay_steps is None):
            raise ValueError(
                f"schedule {self.schedule} with decay_steps {self.decay_steps}: a linear or cosine schedule needs decay_steps "
                "(optimizer steps: iterations times minibatches times epochs), a constant one takes none"
            )
        return self


class CriticOptimizer(OptimizerConfig):
    """The policy's optimizer settings, with a higher rate."""

    learning_rate: PositiveFloat = 1e-3
    """Unset, in a run: 1e-3 with a policy of `policy.kind: warm_start`, 1e-5 with a pretrained one."""


class CriticConfig(Section):
    """A second model that predicts the reward to come at each generated token, and learns with the policy."""

    model: Code[str | None] = None
    """Model directory to begin from, with the policy's tokenizer: a local path, file:// or s3:// URI. Unset: the weights that
    the policy begins from."""
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: PositiveFloat | None = 0.2
    """Largest counted change of a prediction since before the first update, in units of the reward; unset: unlimited."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations in which the critic alone learns and the policy stays, counted from the critic's first."""


class TokenLoss(Section):
    """Keys of every algorithm's loss: how token terms become a mean, KL to a reference, entropy."""

    if TYPE_CHECKING:
        kind: str
    loss_aggregation: Aggregation = "token"
    """token: mean over all trained tokens of an update. sequence: mean over sequences of their token means. rollout: the same
    in two stages, so that a rollout of several sequences counts once. fixed_length: sum over tokens, divided by rollouts times
    `fixed_length` (Dr. GRPO)."""
    fixed_length: PositiveInt | None = None
    """Tokens taken as every rollout's length under loss_aggregation fixed_length; it only sets the loss' size."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference (the starting policy). 0 loads no reference."""
    reference_every: PositiveInt | None = None
    """Iterations after which the reference is renewed: it becomes the version that the next iteration trains from. Unset: it
    stays the starting policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Unset with kl_placement reward: k1, the only one whose reward has the KL's gradient."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """loss: a term added to the policy's, with its own gradient. reward: subtracted from the reward, token by token."""
    kl_importance_weighting: bool = False
    """Weight the KL term by exp(cur - gen), at most 2, which corrects it for tokens that an older policy sampled."""
    adaptive_kl: AdaptiveKL | None = None
    """Controller of kl_coefficient, which is its initial value. Unset: the coefficient is constant."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0

    @property
    def needs_groups(self) -> bool:
        """Return whether rollouts are compared within their group, so that a group of one is useless."""
        return True

    @property
    def needs_sampled_tokens(self) -> bool:
        """Return whether the loss uses the probability of each token when it was sampled."""
        return True

    @property
    def reference_source(self) -> str | None:
        """Return the trainer's reference model: `start` (version 0), a model directory, or None."""
        return "start" if self.kl_coefficient > 0 else None

    @property
    def critic_section(self) -> CriticConfig | None:
        """Return the critic's section; None for an algorithm without one."""
        return None

    @property
    def single_update_only(self) -> str | None:
        """The setting that is right for one optimizer step an iteration alone, as `key: value`, if there is one."""
        return None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Return the bounds of the mismatch correction; None for an algorithm that does not weigh tokens by the policy."""
        return None

    def by_environment(self) -> dict[str, Self]:
        """Return the algorithms of the environments of a mixture that differ, by the environment's name."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _estimator(cls, values: Any) -> Any:
        """In the reward, an estimator that is not named is k1."""
        if isinstance(values, dict) and values.get("kl_placement") == "reward":
            return {"kl_estimator": "k1"} | values
        return values

    @model_validator(mode="after")
    def _loss(self, info: ValidationInfo) -> Self:
        if (self.loss_aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"loss_aggregation is {self.loss_aggregation} and fixed_length is {self.fixed_length}: the two belong "
                "together. Set both (loss_aggregation: fixed_length) or leave fixed_length unset."
            )
        if self.adaptive_kl is not None and self.kl_coefficient == 0:
            raise ValueError(
                "adaptive_kl multiplies kl_coefficient, which is 0 and would stay 0. Set kl_coefficient, 0.1 for example."
            )
        if self.reference_every is not None and self.reference_source != "start":
            raise ValueError(
                f"reference_every is {self.reference_every}, but the run has no reference to renew. Set kl_coefficient, 0.01 "
                "for example, or remove reference_every."
            )
        if self.kl_importance_weighting and self.kl_placement == "reward":
            raise ValueError(
                "kl_importance_weighting is for the KL term of the loss, but kl_placement is reward. Unset one of them."
            )
        if self.kl_placement == "reward" and self.kl_estimator != "k1" and not is_recorded(info):
            raise ValueError(
                f"kl_estimator is {self.kl_estimator} and kl_placement reward: as a reward, its expected gradient leads "
                "away from the reference as often as back to it. Set kl_estimator to k1, or kl_placement to loss."
            )
        return self


class EnvironmentAlgorithm(Section):
    """Algorithm settings for one environment of a mixture: keys that act on single sequences. Unset keys are the run's.
    The loss on tokens (ratio, clipping, correction, mean) is common to all."""

    normalize_by_std: bool | None = None
    leave_one_out: bool | None = None
    advantage_clip: tuple[float, float] | None = None
    positive_nll_weight: Annotated[float, Field(ge=0)] | None = None
    mask_truncated: bool | None = None
    reward: RewardShaping | None = None
    """The whole section: nothing of the run's shaping is left."""
    kl_coefficient: Annotated[float, Field(ge=0)] | None = None
    entropy_coefficient: Annotated[float, Field(ge=0)] | None = None


def _known_loss(name: str) -> str:
    if not re.match(TARGET, name) and name not in (known := plugins.names("loss")):
        raise ValueError(
            f"unknown policy loss {name!r}. Set it to {', '.join(known)}, module:function or path/to/file.py:function."
        )
    return name


def _list_losses(schema: dict[str, Any]) -> None:
    named = {"enum": list(plugins.names("loss")), "type": schema.pop("type")}
    schema["anyOf"] = [named, {"pattern": TARGET, "type": "string"}]


LossName = Annotated[
    str, AfterValidator(_known_loss), Field(json_schema_extra=_list_losses), Consent("code", role="loss")
]


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Traits of a plug-in of the role `loss`."""

    single_update_only: bool = False
    """It is right for one optimizer step an iteration alone."""
    takes_ratio: bool = True
    """It accepts another `importance_ratio` than token."""
    clips: Literal["surrogate", "ratio"] | None = None
    """The quantity whose clipped share is the metric `clip_fraction`; None: it has no such metric."""


CLIPPED = LossTraits(clips="surrogate")
CISPO = LossTraits(takes_ratio=False, clips="ratio")
REINFORCE = LossTraits(single_update_only=True, takes_ratio=False)


def loss_traits(name: str) -> LossTraits:
    """Return the traits of `policy_loss`; the default ones for a function named by `module:function`."""
    return LossTraits() if ":" in name else plugins.traits("loss", name) or LossTraits()


class PolicyGradient(TokenLoss):
    """Keys of the algorithms that weigh tokens by an advantage."""

    policy_loss: LossName = "clipped"
    """clipped: PPO's surrogate. cispo: log-probability weighted by the clipped ratio, no gradient through it. reinforce:
    log-probability alone, for one update an iteration: nothing corrects for the policy that the others start from. Or a
    function of your own, `module:function` or `path/to/file.py:function` (docs/algorithms.md)."""
    importance_ratio: Literal["token", "sequence", "on_policy"] = "token"
    """token: exp(cur - old) of each token. sequence: the geometric mean of these over the sequence (GSPO). on_policy: 1 with
    a gradient, for one update an iteration."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio counts as at least 1 - clip_low; 1 sets no lower bound."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """The ratio counts as at most 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages."""
    advantage_clip: tuple[float, float] | None = None
    """Bounds of the advantage."""
    positive_nll_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of cross-entropy on the rollouts with a positive reward (VAPO, arXiv 2504.05118)."""
    mask_truncated: bool = False
    """Do not train on truncated rollouts; they count in the baseline all the same (DAPO's overlong filtering)."""
    reward: RewardShaping = RewardShaping()
    mismatch_correction: MismatchCorrection = "auto"
    """Correction of differences between trainer and engine log-probabilities, which are always measured. auto: tis in
    sequences with a mean difference above 0.01 nats a token, none in the others."""
    mismatch_bounds: tuple[float, float] | None = None
    """Bounds of exp(trainer - engine) log-probability: of a token, or (seq-mask-tis, importance_ratio sequence) of a sequence's
    geometric mean. Unset: 0.5 to 5, for auto and tis 0 to 2, for seq-mask-tis 0.999 to 1.002."""
    max_sequence_error: Annotated[float, Field(gt=1)] | None = None
    """Omit the policy term of sequences whose mean of exp(abs(trainer - engine)) is above this. Unset: omit none."""
    environments: dict[EnvironmentName, EnvironmentAlgorithm] = Field(default_factory=dict)
    """Settings of the environments of a mixture that differ, by the environment's name. The algorithm computes each by itself,
    over its own groups, and the others together."""

    def of_environment(self, name: str) -> Self:
        """Return the algorithm for an environment in `environments`.

        Raises:
            ValueError: this algorithm lacks a key, or refuses its value.
        """
        section = self.environments[name]
        own = {key: value for key in type(section).model_fields if (value := getattr(section, key)) is not None}
        for key, value in own.items():
            if key not in type(self).model_fields:
                raise ValueError(
                    f"environments.{name}.{key} is {value}, but the run's algorithm has no key {key}. Leave it out."
                )
        return type(self).model_validate(self.model_dump(exclude={"environments"}) | own)

    def by_environment(self) -> dict[str, Self]:
        return {name: self.of_environment(name) for name in self.environments}

    @property
    def bounds(self) -> tuple[float, float]:
        """`mismatch_bounds`, or its default for the algorithm."""
        return self.mismatch_bounds or DEFAULT_BOUNDS.get(self.mismatch_correction, (0.5, 5.0))

    @property
    def single_update_only(self) -> str | None:
        if loss_traits(self.policy_loss).single_update_only:
            return f"policy_loss: {self.policy_loss}"
        return "importance_ratio: on_policy" if self.importance_ratio == "on_policy" else None

    @model_validator(mode="after")
    def _policy(self) -> Self:
        low, high = self.bounds
        kind, ratio, mean = self.policy_loss, self.importance_ratio, self.loss_aggregation
        for wrong, why in (
            (
                kind != "clipped" and self.dual_clip is not None,
                f"dual_clip ({self.dual_clip}) bounds the clipped loss, but policy_loss is {kind}. Unset dual_clip.",
            ),
            (
                not loss_traits(kind).takes_ratio and ratio != "token",
                f"importance_ratio {ratio} has no effect with policy_loss {kind}. Set importance_ratio to token, or "
                "policy_loss to clipped.",
            ),
            (
                kind == "cispo" and mean != "token",
                f"policy_loss cispo is a mean over tokens, but loss_aggregation is {mean}. Set loss_aggregation to token.",
            ),
            (
                ratio == "sequence" and mean not in ("sequence", "rollout"),
                f"importance_ratio sequence gives one ratio to a whole sequence, but loss_aggregation is {mean}, which weighs "
                "sequences by their length. Set loss_aggregation to sequence or rollout.",
            ),
            (
                ratio == "sequence" and self.mismatch_correction == "seq-mask-tis",
                "mismatch_correction seq-mask-tis keeps weights a token, but importance_ratio is sequence. Set "
                "mismatch_correction to tis or icepop.",
            ),
            (
                not 0 <= low < 1 < high,
                f"mismatch_bounds is [{low}, {high}]: engine and trainer that agree have a ratio of 1, which must lie inside. "
                "Give 0 <= low < 1 < high.",
            ),
            (
                self.advantage_clip is not None and not self.advantage_clip[0] < self.advantage_clip[1],
                f"advantage_clip is {self.advantage_clip}, an empty range. Give the lower bound first.",
            ),
        ):
            if wrong:
                raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _by_environment(self) -> Self:
        """One reference, one exact entropy and one controller of the KL serve all environments."""
        for name, own in self.environments.items():
            for key in ("kl_coefficient", "entropy_coefficient"):
                if getattr(self, key) == 0 and (value := getattr(own, key)):
                    raise ValueError(
                        f"environments.{name}.{key} is {value}, but {key} is 0, so that the trainer computes nothing for it. "
                        f"Set {key} to {value}, and that of the other environments to 0."
                    )
            if self.adaptive_kl is not None and own.kl_coefficient is not None:
                raise ValueError(
                    f"environments.{name}.kl_coefficient is {own.kl_coefficient}, but adaptive_kl steers one coefficient by "
                    "the KL of all rollouts. Leave one of the two out."
                )
            self.of_environment(name)
        return self


class GroupRelativeConfig(PolicyGradient):
    """A rollout against the other rollouts of its task."""

    normalize_by_std: bool = True
    """Divide the advantage by the group's standard deviation; false gives Dr. GRPO's advantage."""
    leave_one_out: bool = False
    """Baseline from the other rollouts of the group only."""
    turn_discount: Fraction | None = None
    """Credit by turn, if the environment rewards turns: a turn's return is the next reward plus later ones, each
    discounted by this factor; 0 counts only the next one. Returns are compared within the group reward by reward.
    Unset: every turn gets the whole rollout's reward."""

    @model_validator(mode="after")
    def _plain_rewards_of_turns(self) -> Self:
        if self.turn_discount is None:
            return self
        if self.reward != RewardShaping() or self.kl_placement == "reward":
            key = "reward" if self.reward != RewardShaping() else "kl_placement: reward"
            raise ValueError(
                f"turn_discount is {self.turn_discount} and {key} is set, which changes the reward of whole rollouts. Remove "
                f"one of them."
            )
        return self


class GRPOConfig(GroupRelativeConfig):
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300), token-level loss as in DAPO (2503.14476)."""

    kind: Literal["grpo"] = "grpo"


class DrGRPOConfig(GroupRelativeConfig):
    """GRPO without its two biases: no division by the spread, none by the length (arXiv 2503.20783)."""

    kind: Literal["dr_grpo"]
    normalize_by_std: Literal[False] = False
    loss_aggregation: Literal["fixed_length"] = "fixed_length"
    fixed_length: PositiveInt | None = 512
    clip_high: Annotated[float, Field(ge=0)] = 0.2


class RLOOConfig(GroupRelativeConfig):
    """REINFORCE leave-one-out (arXiv 2402.14740): the reward minus the mean of the others' rewards.

    The clipped loss has REINFORCE's gradient in an iteration's first update and stays right in the following ones.
    """

    kind: Literal["rloo"]
    normalize_by_std: Literal[False] = False
    leave_one_out: Literal[True] = True


class DAPOConfig(GroupRelativeConfig):
    """GRPO with a wider upper clip, token mean, no KL and truncated rollouts omitted (arXiv 2503.14476).

    Its dynamic sampling belongs to collection: `rollout.dynamic_sampling`. With `reward.overlong`, rewards of 0 to 1
    are scaled to the paper's -1 to 1, unless `reward.scaling` is set.
    """

    kind: Literal["dapo"]
    loss_aggregation: Literal["token"] = "token"
    mask_truncated: bool = True

    @model_validator(mode="before")
    @classmethod
    def _scaled(cls, values: Any) -> Any:
        """The overlong penalty is as large as half of the paper's rewards, -1 and 1, so it comes with them."""
        if not isinstance(values, dict):
            return values
        section, environments = _with_scale(values), values.get("environments")
        if isinstance(environments, dict):
            section = section | {"environments": {name: _with_scale(own) for name, own in environments.items()}}
        return section


def _with_scale(section: Any) -> Any:
    """Add the default scale to `reward` if it has the overlong penalty and no scale."""
    reward = section.get("reward") if isinstance(section, dict) else None
    if isinstance(reward, dict) and reward.get("overlong") is not None:
        return section | {"reward": {"scaling": {}} | reward}
    return section


class GSPOConfig(GroupRelativeConfig):
    """Group sequence policy optimisation (arXiv 2507.18071): ratio and clip of whole sequences, the paper's bounds."""

    kind: Literal["gspo"]
    importance_ratio: Literal["sequence"] = "sequence"
    policy_loss: Literal["clipped"] = "clipped"
    loss_aggregation: Literal["sequence", "rollout"] = "sequence"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    clip_high: Annotated[float, Field(ge=0)] = 4e-4


class CISPOConfig(GroupRelativeConfig):
    """Clipped importance weights, so that no token loses its gradient (MiniMax-M1, arXiv 2506.13585)."""

    kind: Literal["cispo"]
    policy_loss: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    clip_high: Annotated[float, Field(ge=0)] = 4.0


class ReinforcePlusPlusConfig(PolicyGradient):
    """REINFORCE++ (arXiv 2501.03262): KL in the reward of each token, advantages normalised over the batch."""

    kind: Literal["reinforce_plus_plus"]
    minus_baseline: bool = True
    """Subtract the group's mean first, which takes groups of two or more. false: no group is needed."""
    normalize_batch: bool = True
    """Zero mean and unit variance over all trained tokens of the iteration."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    kl_coefficient: Annotated[float, Field(ge=0)] = 1e-3
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1, unless kl_placement is loss."""
    kl_placement: Literal["loss", "reward"] = "reward"

    @property
    def needs_groups(self) -> bool:
        return self.minus_baseline


class PPOConfig(PolicyGradient):
    """Proximal policy optimisation with a critic (arXiv 1707.06347) and generalised advantages (1506.02438).

    It needs no groups: a token is compared with the critic's prediction before it.
    """

    kind: Literal["ppo"]
    critic: CriticConfig = CriticConfig()
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of the reward for each generated token that it is away."""
    gae_lambda: Fraction = 1.0
    """1: the reward itself minus the critic's prediction. Less: the critic's later predictions in the reward's place, with
    less noise and the critic's errors; 0: the next one alone."""
    whiten_advantages: bool = True
    """Zero mean and unit variance over all trained tokens of the iteration."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2

    @property
    def needs_groups(self) -> bool:
        return False

    @property
    def critic_section(self) -> CriticConfig | None:
        return self.critic


class GDPOConfig(GroupRelativeConfig):
    """One group-relative advantage a reward component, then their weighted sum (arXiv 2601.05242)."""

    kind: Literal["gdpo"]
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward component. Empty: every component that the environment gives, 1 each."""
    normalize_batch: bool = True
    """Zero mean and unit standard deviation over the rollouts of the iteration."""
    kl_placement: Literal["loss"] = "loss"
    turn_discount: Literal[None] = None

    @model_validator(mode="after")
    def _components(self) -> Self:
        if len(self.weights) == 1:
            raise ValueError(
                f"weights names one component, {next(iter(self.weights))!r}: kind gdpo needs two or more. Name the others, or "
                "set kind to grpo."
            )
        _refuse_shaping(self)
        return self


class CrossEntropyConfig(TokenLoss):
    """Likelihood of chosen rollouts: supervised fine-tuning (all of them) and rejection sampling (the good ones)."""

    kind: Literal["cross_entropy"]
    select: Literal["all", "threshold", "best_of_group"] = "all"
    """all; rollouts with a reward of at least `reward_threshold`; or each group's rollout with the highest reward (the
    first of equal ones, and only if it reaches `reward_threshold`, if set)."""
    reward_threshold: float | None = None
    include_truncated: bool = False
    """Also learn from rollouts that a limit cut off."""
    kl_placement: Literal["loss"] = "loss"

    @property
    def needs_groups(self) -> bool:
        return False

    @property
    def needs_sampled_tokens(self) -> bool:
        return False

    @model_validator(mode="after")
    def _threshold(self) -> Self:
        if self.select == "threshold" and self.reward_threshold is None:
            raise ValueError("select is threshold, but reward_threshold is not set. Set it, 1.0 for example.")
        if self.select == "all" and self.reward_threshold is not None:
            raise ValueError(
                f"reward_threshold is {self.reward_threshold}, but select is all, which does not look at rewards. Set select "
                "to threshold or best_of_group."
            )
        return self


class DistillationConfig(PolicyGradient):
    """On-policy distillation (arXiv 2306.13649): a token's advantage is how much likelier the teacher finds it.

    The environment's reward is recorded and not used. The teacher shares the policy's tokenizer.
    """

    kind: Literal["distillation"]
    teacher: Code[str]
    """Model directory with config.json and safetensors: a local path, file:// or s3:// URI."""
    mismatch_correction: MismatchCorrection = "icepop"
    kl_coefficient: Annotated[float, Field(ge=0, le=0)] = 0.0
    """Always 0: the teacher takes the reference's place."""

    @property
    def needs_groups(self) -> bool:
        return False

    @property
    def reference_source(self) -> str | None:
        return self.teacher

    @model_validator(mode="after")
    def _no_reward(self) -> Self:
        _refuse_shaping(self)
        return self


class CustomAlgorithmConfig(PolicyGradient):
    """An algorithm of your own, imported by name; docs/algorithms.md has an example."""

    kind: Literal["custom"]
    target: Target
    """`module:Class` or `path/to/file.py:Class` of an `Algorithm` (roundhouse.training.algorithms), made with this section and
    `parameters`."""
    parameters: Parameters = Field(default_factory=dict)
    """Keyword arguments of the class."""


AlgorithmConfig = Annotated[TokenLoss, Kinds("algorithm")]


def _refuse_shaping(config: GDPOConfig | DistillationConfig) -> None:
    if shaping := config.reward.model_dump(exclude_none=True):
        raise ValueError(
            f"reward shapes the rollout's reward ({', '.join(shaping)}), which kind {config.kind} does not use. Unset it."
        )
