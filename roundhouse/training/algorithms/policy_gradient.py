"""Common part of all policy gradients: from rewards to columns, with hooks for the advantage and the trainable
sequences.

Invariant: an untrainable sequence, or one masked as truncated, has weight 0 in every term; for the others, the
advantage applies to generated tokens only. A group has spread if its rewards differ both as given by the environment
and after shaping, so neither a penalty nor KL noise alone trains.

    class SignOnly(PolicyGradientAlgorithm):
        '''+1 above the group's mean, −1 below.'''

        def advantages(self, sequences, rewards, groups):
            return np.sign(rewards.values - groups.of_sequences(groups.means))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from roundhouse.config.algorithms import AdaptiveKL, OverlongShaping, PolicyGradient, RewardShaping, Scaling, TokenLoss
from roundhouse.errors import DataError
from roundhouse.training.algorithms import AlgorithmInputs, LossSettings, TokenColumns, TokenSignals
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.loss import KL_INPUT_CLAMP, KL_OUTPUT_CLAMP, loss_function
from roundhouse.trajectories.records import SPREAD_TOLERANCE


@dataclass(frozen=True, slots=True)
class Groups:
    """S sequences of R rollouts in G groups, numbered in order of first appearance.

    A rollout counts once in its group, however many sequences it has. A group has one `group_id`; equal prompts do not
    make a group.

    The branches of a turn form a group, with the rollout that they leave as one more member for comparison. That
    rollout is trained on only in its own group. Its reward does not depend on a branch's samples, so the baseline is
    unbiased.
    """

    group_ids: list[str]
    rollout_of_sequence: np.ndarray
    """[S] int."""
    group_of_sequence: np.ndarray
    """[S] int."""
    group_of_rollout: np.ndarray
    """[R] int."""
    rollout_rewards: np.ndarray
    """[R] float64: mean reward of the rollout's sequences."""
    sizes: np.ndarray
    """[G] int: rollouts of each group, including the source of branches."""
    means: np.ndarray
    """[G] float64: mean of these rollouts' rewards."""
    stds: np.ndarray
    """[G] float64: their sample standard deviation (divisor n - 1); 0 for a group of one."""
    has_spread: np.ndarray
    """[G] bool: the rollouts' rewards are not all equal. Only such a group can teach anything."""

    @classmethod
    def of(cls, sequences: TrainingSequences, rewards: np.ndarray | None = None) -> Groups:
        """Statistics over `rewards` ([S] float64), by default those of `sequences`."""
        rollouts, rollout_of_sequence = _number(sequences.rollout_ids)
        groups, group_of_sequence = _number(sequences.group_ids)
        group_of_rollout = np.zeros(len(rollouts), dtype=np.int64)
        group_of_rollout[rollout_of_sequence] = group_of_sequence
        values = sequences.rewards if rewards is None else rewards
        rewards = _means(values, rollout_of_sequence, len(rollouts))
        numbers = {name: number for number, name in enumerate(rollouts)}
        # Per group of branches, the source rollout, if it is among the sequences.
        left = {
            int(group): numbers[origin]
            for group, origin in zip(group_of_sequence, sequences.branched_from, strict=True)
            if origin in numbers
        }
        owners = np.concatenate([group_of_rollout, np.array(list(left), dtype=np.int64)])
        compared = np.concatenate([rewards, rewards[list(left.values())]])
        sizes = np.bincount(owners, minlength=len(groups))
        means = _means(compared, owners, len(groups))
        squares = np.bincount(owners, (compared - means[owners]) ** 2, minlength=len(groups))
        highest = np.full(len(groups), -np.inf)
        lowest = np.full(len(groups), np.inf)
        np.maximum.at(highest, owners, compared)
        np.minimum.at(lowest, owners, compared)
        largest = np.maximum(1.0, np.maximum(np.abs(highest), np.abs(lowest)))
        return cls(
            group_ids=groups,
            rollout_of_sequence=rollout_of_sequence,
            group_of_sequence=group_of_sequence,
            group_of_rollout=group_of_rollout,
            rollout_rewards=rewards,
            sizes=sizes,
            means=means,
            stds=np.sqrt(squares / np.maximum(sizes - 1, 1)),
            has_spread=highest - lowest > SPREAD_TOLERANCE * largest,
        )

    def of_sequences(self, values: np.ndarray) -> np.ndarray:
        """[S] from [G]: each sequence's group's value."""
        return values[self.group_of_sequence]

    def per_rollout(self, values: np.ndarray) -> np.ndarray:
        """[R] from [S]: the mean over each rollout's sequences."""
        return _means(values, self.rollout_of_sequence, len(self.rollout_rewards))

    def totals(self, values: np.ndarray) -> np.ndarray:
        """[S] from [S]: the sum over all sequences of the same rollout."""
        return np.bincount(self.rollout_of_sequence, values, minlength=len(self.rollout_rewards))[
            self.rollout_of_sequence
        ]

    def percentages(self) -> dict[str, float]:
        """Shares of the groups in percent: all rewards 0, all 1, all equal to something else, and mixed."""
        flat = ~self.has_spread
        zero = flat & (np.abs(self.means) <= SPREAD_TOLERANCE)
        one = flat & (np.abs(self.means - 1) <= SPREAD_TOLERANCE)
        return {
            "baseline_reward/pct_0": 100 * float(zero.mean()),
            "baseline_reward/pct_1": 100 * float(one.mean()),
            "baseline_reward/pct_flat": 100 * float((flat & ~zero & ~one).mean()),
            "baseline_reward/pct_mixed": 100 * float(self.has_spread.mean()),
        }


def _number(names: list[str]) -> tuple[list[str], np.ndarray]:
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return list(index), np.array([index[name] for name in names], dtype=np.int64)


def _means(values: np.ndarray, owners: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(owners, values, minlength=count) / np.bincount(owners, minlength=count)


def shape_rewards(sequences: TrainingSequences, shaping: RewardShaping) -> np.ndarray:
    """[S] float64 rewards after scaling, the factor of truncated rollouts and the overlong penalty, in this order.

    Raises:
        DataError: a reward is outside of the scaling's source, and that does not clamp.
    """
    rewards = sequences.rewards
    if shaping.scaling is not None:
        low, high = shaping.scaling.source
        outside = np.flatnonzero((rewards < low) | (rewards > high))
        if shaping.scaling.outside == "refuse" and len(outside):
            first = outside[0]
            raise DataError(
                f"sequence {sequences.sequence_ids[first]!r} has the reward {rewards[first]:g}, outside of "
                f"train.algorithm.reward.scaling.source [{low:g}, {high:g}] ({len(outside)} of {len(sequences)} sequences). "
                "Set source to the range of the environment's rewards, outside to clamp, or leave scaling out."
            )
        rewards = scale(rewards, shaping.scaling)
    if shaping.truncated_factor is not None:
        rewards = np.where(sequences.truncated, shaping.truncated_factor * rewards, rewards)
    if shaping.overlong is not None:
        rewards = rewards + overlong_penalties(sequences.generated_tokens, shaping.overlong, shaping.overlong_penalty)
    return rewards


def scale(rewards: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Clamp to the source range, then map it linearly to the target range."""
    (low, high), (start, end) = scaling.source, scaling.target
    return start + (np.clip(rewards, low, high) - low) * (end - start) / (high - low)


def overlong_penalties(generated_tokens: np.ndarray, shaping: OverlongShaping, penalty: float) -> np.ndarray:
    """[S] penalties: 0 up to `limit - buffer` tokens, then linear, and `-penalty` from the limit on.

    DAPO (arXiv 2503.14476), equation 13. The length is the whole rollout's, not that of its first answer, and the
    penalty has a floor: a rollout twice as long as the limit is not worse than one at it.
    """
    beyond = generated_tokens - (shaping.max_generated_tokens - shaping.buffer_tokens)
    return -np.clip(beyond / shaping.buffer_tokens, 0.0, 1.0) * penalty


MAX_RELATIVE_ERROR = 0.2
"""The adaptive controller moves by at most this share a horizon, however far the KL is from its target."""
LEAST_FACTOR = 0.5
"""The adaptive controller takes away at most half an iteration: with many more rollouts than a horizon it would go below 0."""


def sampled_kl(old: np.ndarray, reference: np.ndarray, estimator: Literal["k1", "k2", "k3"]) -> np.ndarray:
    """[T] KL(policy ‖ reference) at each token, clamped like the loss's; with d = reference − old: −d, d²/2, exp(d) − 1 − d."""
    d = np.clip(reference.astype(np.float64) - old, -KL_INPUT_CLAMP, KL_INPUT_CLAMP)
    values = {"k1": lambda: -d, "k2": lambda: d**2 / 2, "k3": lambda: np.expm1(d) - d}[estimator]()
    return np.clip(values, -KL_OUTPUT_CLAMP, KL_OUTPUT_CLAMP)


def to_go(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[T] sum from each token to the end of its sequence.

    Example: sequences [1 2 3 | 4 5] give [6 5 3 | 9 5].
    """
    ahead = np.cumsum(values[::-1])[::-1]
    after = np.append(ahead, 0.0)[offsets[1:]]
    return ahead - np.repeat(after, np.diff(offsets))


def next_coefficient(coefficient: float, measured: float, rollouts: int, controller: AdaptiveKL | None) -> float:
    """The coefficient after an iteration that measured this KL a token, on this many rollouts.

    Ziegler et al., arXiv 1909.08593, section 2.2. Without a controller it stays.
    """
    if controller is None:
        return coefficient
    error = min(max(measured / controller.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coefficient * max(1 + error * rollouts / controller.horizon, LEAST_FACTOR)


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of an iteration, on their way to advantages.

    Shaping does not change the record: the environment's reward stays on the sequence, decides the spread, and is
    reported as `reward`. All sequences of a rollout get the same correction. The KL in the reward is a constant of the
    sampled tokens without a gradient (`loss.reference_kl` has one with a gradient).
    """

    values: np.ndarray
    """[S] float64: shaped rewards, minus the KL if that is in the reward of whole rollouts."""
    shaped: np.ndarray
    """[S] float64: shaped alone."""
    kl: np.ndarray | None
    """[T] float64: coefficient times KL at each generated token; None without KL in the reward."""
    metrics: dict[str, float]
    estimates: CriticEstimates | None = None
    """Advantages and returns from a critic's predictions; None without one."""


@dataclass(frozen=True, slots=True)
class CriticEstimates:
    """[T] float64 each, at generated tokens."""

    advantages: np.ndarray
    returns: np.ndarray
    """The critic's targets: the advantage plus its prediction."""


class PolicyGradientAlgorithm:
    """A source of columns from advantages. Subclasses define `advantages`; `trainable_sequences`, unless it is group spread."""

    kl_of_rollouts = True
    """With KL in the reward: subtract the sum over the rollout from its reward. A subclass that places it token by token
    sets this to False and reads `Rewards.kl`."""

    def __init__(self, config: PolicyGradient) -> None:
        """Raises ConfigError: `policy_loss` names no function."""
        self.config = config
        loss_function(config.policy_loss)

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
        """Return [S] advantages, or [T] if tokens of a sequence differ; `groups` has the statistics of
        `rewards.values`."""
        raise NotImplementedError

    def baselines(self, groups: Groups) -> np.ndarray:
        """Return [S] baselines of the rewards, for people to inspect."""
        return groups.of_sequences(groups.means)

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        """Return [S] bool; `groups` has the statistics of the environment's rewards, and spread if shaping left some."""
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
        positive = np.repeat(sequences.rewards > 0, sequences.lengths)
        columns = TokenColumns(
            advantages=by_token.astype(np.float32) * weights,
            policy_weights=weights,
            reference_kl_weights=weights * np.float32(coefficient if self.config.kl_placement == "loss" else 0),
            entropy_weights=weights * np.float32(self.config.entropy_coefficient),
            cross_entropy_weights=weights * positive * np.float32(self.config.positive_nll_weight),
        )
        advantage_column = per_sequence(by_token * np.repeat(trainable, sequences.lengths), sequences)
        metrics = reward_metrics(sequences, plain) | advantage_metrics(advantage_column) | rewards.metrics
        if coefficient > 0:
            metrics["kl_coefficient"] = coefficient
        if rewards.shaped is not sequences.rewards:
            metrics["num_groups_shaped_flat"] = float(flattened)
        if self.config.mask_truncated:
            metrics["num_truncated_masked"] = float(masked.sum())
        returns = None if rewards.estimates is None else rewards.estimates.returns.astype(np.float32)
        return TokenSignals(
            columns, metrics, {"advantage": advantage_column, "baseline": self.baselines(groups)}, returns
        )

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


def current_coefficient(config: TokenLoss, inputs: AlgorithmInputs) -> float:
    """Return the KL coefficient of this iteration: the controller's under `adaptive_kl`, else the configured one.

    The controller derives it from the previous iteration. It is stored in the trainer's cursor, so a resumed run
    continues with it.
    """
    if config.adaptive_kl is None or inputs.kl_coefficient is None:
        return config.kl_coefficient
    return inputs.kl_coefficient


VARIANCE_FLOOR = 1e-8


def normalized(values: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """`values` shifted and scaled to mean 0 and variance 1 over the `trained` ([T] bool) tokens; as they are without any."""
    chosen = values[trained]
    if not len(chosen):
        return values
    return (values - chosen.mean()) / np.sqrt(max(chosen.var(), VARIANCE_FLOOR))


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
    """Return the metrics of [S] advantages."""
    return {
        "advantages/mean": float(advantages.mean()),
        "advantages/max": float(advantages.max()),
        "advantages/min": float(advantages.min()),
    }
