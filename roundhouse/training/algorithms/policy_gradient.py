"""What all policy gradients share: from rewards to columns, with a hook for the advantage and one for the trainable sequences.

Invariant: a sequence that is not trainable, or that is masked as truncated, has no weight in any term; the advantage of all
others stands on their generated tokens and nowhere else. Rewards are read through `rewards.shape_rewards` and, with KL in the
reward, less the KL of the whole rollout. A group has spread when its rewards differ as the environment gave them and as they
are shaped: what shaping makes equal teaches nothing, and neither does a penalty or KL noise alone.

A new algorithm is a subclass with its `advantages`:

    class SignOnly(PolicyGradientAlgorithm):
        \"\"\"+1 above the group's mean, −1 below.\"\"\"

        def advantages(self, sequences, rewards, groups):
            return np.sign(rewards.values - groups.of_sequences(groups.means))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from roundhouse.config.objectives import PolicyGradient, TokenLoss
from roundhouse.training.algorithm import AlgorithmInputs, LossSettings, TokenColumns, TokenSignals
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.rewards import Groups, sampled_kl, shape_rewards


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of an iteration, on their way to advantages."""

    values: np.ndarray
    """[S] float64: shaped, and less the KL where that is in the reward of whole rollouts."""
    shaped: np.ndarray
    """[S] float64: shaped alone."""
    kl: np.ndarray | None
    """[T] float64: coefficient times KL at each generated token; None without KL in the reward."""
    metrics: dict[str, float]


class PolicyGradientAlgorithm:
    """A source of columns from advantages. Subclasses define `advantages`; `trainable_sequences`, unless it is group spread."""

    kl_of_rollouts = True
    """With KL in the reward: subtract the sum over the rollout from its reward. A subclass that places it token by token
    sets this to False and reads `Rewards.kl`."""

    def __init__(self, config: PolicyGradient) -> None:
        self.config = config

    @property
    def loss(self) -> LossSettings:
        config = self.config
        return LossSettings(
            policy_loss=config.policy_loss,
            importance_ratio=config.importance_ratio,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            kl_estimator=config.kl_estimator,
            kl_importance_weighting=config.kl_importance_weighting,
            aggregation=config.loss_aggregation,
            fixed_length=config.fixed_length,
            mismatch_correction=config.mismatch_correction,
            mismatch_bounds=config.bounds,
            max_sequence_error=config.max_sequence_error,
        )

    @property
    def needs_reference(self) -> bool:
        return self.config.reference_source is not None

    @property
    def needs_log_probs(self) -> bool:
        return self.config.kl_placement == "reward" and self.needs_reference

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        """[S] advantages, or [T] where tokens of a sequence differ; `groups` has the statistics of `rewards.values`."""
        raise NotImplementedError

    def baselines(self, groups: Groups) -> np.ndarray:
        """[S] what a reward is compared with, for a person to see."""
        return groups.of_sequences(groups.means)

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        """[S] bool; `groups` has the statistics of the environment's rewards, and spread where shaping left some."""
        return groups.of_sequences(groups.has_spread)

    def compute(self, sequences: TrainingSequences, inputs: AlgorithmInputs = AlgorithmInputs()) -> TokenSignals:
        coefficient = current_coefficient(self.config, inputs)
        plain = Groups.of(sequences)
        rewards = self.read_rewards(sequences, plain, inputs, coefficient)
        groups = plain if rewards.values is sequences.rewards else Groups.of(sequences, rewards.values)
        judged, flattened = plain, 0
        if rewards.shaped is not sequences.rewards:
            left = Groups.of(sequences, rewards.shaped).has_spread
            judged, flattened = (
                replace(plain, has_spread=plain.has_spread & left),
                int((plain.has_spread & ~left).sum()),
            )
        trainable = self.trainable_sequences(sequences, judged)
        masked = trainable & sequences.truncated if self.config.mask_truncated else np.zeros_like(trainable)
        by_token = per_token(self.advantages(sequences, rewards, groups), sequences)
        if self.config.advantage_clip is not None:
            by_token = np.clip(by_token, *self.config.advantage_clip)
        weights = token_weights(trainable & ~masked, sequences)
        columns = self._columns(sequences, by_token, weights, coefficient)
        shown = per_sequence(by_token * np.repeat(trainable, sequences.lengths), sequences)
        metrics = reward_metrics(sequences, plain) | advantage_metrics(shown) | rewards.metrics
        if coefficient > 0:
            metrics["kl_coefficient"] = coefficient
        if rewards.shaped is not sequences.rewards:
            metrics["num_groups_shaped_flat"] = float(flattened)
        if self.config.mask_truncated:
            metrics["num_truncated_masked"] = float(masked.sum())
        return TokenSignals(columns, metrics, {"advantage": shown, "baseline": self.baselines(groups)})

    def read_rewards(
        self, sequences: TrainingSequences, plain: Groups, inputs: AlgorithmInputs, coefficient: float
    ) -> Rewards:
        """Shape the rewards and take the KL off them; `plain` has the statistics of the environment's."""
        shaped, kl, metrics = shape_rewards(sequences, self.config.reward), None, {}
        values = shaped
        if self.needs_log_probs:
            if inputs.old is None or inputs.reference is None:
                raise ValueError("KL in the reward needs the log-probabilities of policy and reference")
            sampled = sampled_kl(inputs.old, inputs.reference, self.config.kl_estimator) * sequences.loss_mask
            metrics["kl_penalty"] = float(sampled.sum() / sequences.loss_mask.sum())
            kl = coefficient * sampled
            if self.kl_of_rollouts:
                values = values - plain.totals(np.add.reduceat(kl, sequences.offsets[:-1]))
        if values is not sequences.rewards:
            metrics["reward_shaped"] = float(plain.per_rollout(values).mean())
        return Rewards(values, shaped, kl, metrics)

    def _columns(
        self, sequences: TrainingSequences, advantages: np.ndarray, weights: np.ndarray, coefficient: float
    ) -> TokenColumns:
        config = self.config
        positive = np.repeat(sequences.rewards > 0, sequences.lengths)
        return TokenColumns(
            advantages=advantages.astype(np.float32) * weights,
            policy_weights=weights,
            reference_kl_weights=weights * np.float32(coefficient if config.kl_placement == "loss" else 0),
            entropy_weights=weights * np.float32(config.entropy_coefficient),
            cross_entropy_weights=weights * positive * np.float32(config.positive_nll_weight),
        )


def current_coefficient(config: TokenLoss, inputs: AlgorithmInputs) -> float:
    """The KL coefficient of this iteration: the controller's under `adaptive_kl`, else the configured one."""
    if config.adaptive_kl is None or inputs.kl_coefficient is None:
        return config.kl_coefficient
    return inputs.kl_coefficient


def token_weights(chosen: np.ndarray, sequences: TrainingSequences) -> np.ndarray:
    """[T] float32: 1 on the generated tokens of the `chosen` ([S] bool) sequences."""
    return (np.repeat(chosen, sequences.lengths) & sequences.loss_mask).astype(np.float32)


def per_token(values: np.ndarray, sequences: TrainingSequences) -> np.ndarray:
    """[T] from [S] or [T]."""
    return values if values.shape == sequences.token_ids.shape else np.repeat(values, sequences.lengths)


def per_sequence(values: np.ndarray, sequences: TrainingSequences) -> np.ndarray:
    """[S] from [T]: the mean over each sequence's generated tokens."""
    first = sequences.offsets[:-1]
    counts = np.add.reduceat(sequences.loss_mask.astype(np.int64), first)
    return np.add.reduceat(values * sequences.loss_mask, first) / counts


def reward_metrics(sequences: TrainingSequences, groups: Groups) -> dict[str, float]:
    """Rewards and group counts, by the environment's rewards."""
    return {
        "reward": float(groups.rollout_rewards.mean()),
        "num_groups": float(len(groups.sizes)),
        "num_rollouts": float(len(groups.rollout_rewards)),
        "num_sequences": float(len(sequences)),
        "num_groups_of_one": float((groups.sizes == 1).sum()),
        "group_size_min": float(groups.sizes.min()),
        **groups.percentages(),
    }


def advantage_metrics(advantages: np.ndarray) -> dict[str, float]:
    """Of [S] advantages."""
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/max": float(advantages.max()),
        "advantages/min": float(advantages.min()),
    }
