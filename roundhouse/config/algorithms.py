"""What an iteration learns from its rewards: one section an algorithm, told apart by `kind`.

Invariant: a kind fixes what makes the algorithm what it is (by a field with a single allowed value) and leaves the rest open,
with the defaults of its paper. Formulas: docs/algorithms.md.

    train:
      algorithm:
        kind: rloo
        kl_coefficient: 0.01
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from roundhouse.config.objectives import MismatchCorrection, PolicyGradient, TokenLoss
from roundhouse.config.secrets import Parameters
from roundhouse.config.section import PositiveInt, Target


class GroupRelativeConfig(PolicyGradient):
    """A rollout against the other rollouts of its task."""

    normalize_by_std: bool = True
    """Divide the advantage by the group's standard deviation; false gives Dr. GRPO's advantage."""
    leave_one_out: bool = False
    """Baseline from the other rollouts of the group only."""


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
    """GRPO with a wider upper clip, token mean, no KL and truncated rollouts left out (arXiv 2503.14476).

    Its dynamic sampling is how rollouts are collected: `rollout.dynamic_sampling`. With `reward.overlong`, rewards of 0 to 1
    are scaled to the paper's -1 to 1, unless `reward.scaling` says otherwise.
    """

    kind: Literal["dapo"]
    loss_aggregation: Literal["token"] = "token"
    mask_truncated: bool = True

    @model_validator(mode="before")
    @classmethod
    def _scaled(cls, values: Any) -> Any:
        """The overlong penalty is as large as half of the paper's rewards, -1 and 1, so it comes with them."""
        reward = values.get("reward") if isinstance(values, dict) else None
        if isinstance(reward, dict) and reward.get("overlong") is not None:
            return values | {"reward": {"scaling": {}} | reward}
        return values


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


class GDPOConfig(GroupRelativeConfig):
    """One group-relative advantage a reward component, then their weighted sum (arXiv 2601.05242)."""

    kind: Literal["gdpo"]
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward component. Empty: every component that the environment gives, 1 each."""
    normalize_batch: bool = True
    """Zero mean and unit standard deviation over the rollouts of the iteration."""
    kl_placement: Literal["loss"] = "loss"

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
    """all; those with a reward of at least `reward_threshold`; or of each group the one with the highest reward (the first of
    equals, and only if it reaches `reward_threshold`, where set)."""
    reward_threshold: float | None = None
    include_truncated: bool = False
    """Also learn from rollouts that a limit cut off."""
    kl_placement: Literal["loss"] = "loss"

    @property
    def needs_groups(self) -> bool:
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
    teacher: str
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
    """`module:Class` or `path/to/file.py:Class` of an `Algorithm` (roundhouse.training.algorithm), made with this section and
    `parameters`."""
    parameters: Parameters = Field(default_factory=dict)
    """Keyword arguments of the class."""


AlgorithmConfig = Annotated[
    GRPOConfig
    | DrGRPOConfig
    | RLOOConfig
    | DAPOConfig
    | GSPOConfig
    | CISPOConfig
    | ReinforcePlusPlusConfig
    | GDPOConfig
    | CrossEntropyConfig
    | DistillationConfig
    | CustomAlgorithmConfig,
    Field(discriminator="kind"),
]


def _refuse_shaping(config: GDPOConfig | DistillationConfig) -> None:
    if shaping := config.reward.model_dump(exclude_none=True):
        raise ValueError(
            f"reward shapes the rollout's reward ({', '.join(shaping)}), which kind {config.kind} does not use. Unset it."
        )
