"""The built-in algorithms: each states its formula, its invariant and its source.

GroupRelative          grpo, dr_grpo, rloo, dapo, gspo, cispo: they differ in constants alone
GDPO                   an advantage for each reward component
ReinforcePlusPlus      KL in the reward of each token, normalised over the batch
OnPolicyDistillation   a teacher's log-probability of each token
CrossEntropy           likelihood of chosen rollouts
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from roundhouse.config.algorithms import (
    CrossEntropyConfig,
    GDPOConfig,
    GroupRelativeConfig,
    ReinforcePlusPlusConfig,
)
from roundhouse.errors import DataError
from roundhouse.training.algorithms import AlgorithmInputs, LossSettings, TokenColumns, TokenSignals
from roundhouse.training.algorithms.policy_gradient import (
    Groups,
    PolicyGradientAlgorithm,
    Rewards,
    current_coefficient,
    normalized,
    per_token,
    reward_metrics,
    to_go,
    token_weights,
)
from roundhouse.training.batch import TrainingSequences
from roundhouse.trajectories.records import SPREAD_TOLERANCE

STD_EPSILON = 1e-6

logger = logging.getLogger(__name__)


class GroupRelative(PolicyGradientAlgorithm):
    """GRPO's advantage and its variants: a rollout's reward relative to the rollouts of the same task.

    Invariant: within a group the rollouts' advantages sum to zero (with branches, including the rollout that they
    left). A group with equal rewards has weight 0: it is not trained on (no policy, KL or entropy term) and counts in
    no denominator. With reward r, group mean m, sample standard deviation s and size n:

        A = r − m                                    DeepSeekMath, arXiv 2402.03300
        A = (r − m) · n / (n − 1)                    leave_one_out: r minus the mean of the others (RLOO, 2402.14740)
        A / (s + 1e-6)                               normalize_by_std; without it, Dr. GRPO's advantage (2503.20783)

    The spread is always the whole group's. Taken over the others only, as in some leave-one-out code, it is zero for
    the single right answer among wrong ones.

    The kinds grpo, dr_grpo, rloo, dapo, gspo and cispo differ in these two switches and in the constants of the loss.
    """

    def __init__(self, config: GroupRelativeConfig) -> None:
        super().__init__(config)
        self.leave_one_out, self.normalize_by_std = config.leave_one_out, config.normalize_by_std
        self.turn_discount = config.turn_discount

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        if self.turn_discount is not None:
            if not any(sequences.turn_rewards):
                logger.warning(
                    "train.algorithm.turn_discount: turns have no separate rewards; whole rollouts are compared"
                )
            parts = TurnParts.of(sequences, groups, self.turn_discount)
            return parts.advantages(self.leave_one_out, self.normalize_by_std)[parts.of_token]
        return group_advantages(rewards.values, groups, self.leave_one_out, self.normalize_by_std)

    def baselines(self, groups: Groups) -> np.ndarray:
        return group_baselines(groups, self.leave_one_out)

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        if self.turn_discount is None:
            return super().trainable_sequences(sequences, groups)
        parts = TurnParts.of(sequences, groups, self.turn_discount)
        differs = (parts.advantages(False, False) != 0)[parts.of_token]
        of_sequence = np.logical_or.reduceat(differs, sequences.offsets[:-1])
        return groups.of_sequences(np.bincount(groups.group_of_sequence, of_sequence) > 0)


@dataclass(frozen=True, slots=True)
class TurnParts:
    """Rollouts cut after each turn with a separate reward, for credit by turn (`turn_discount`).

    Parts are numbered over all sequences of a rollout, in their order. Part j of a rollout is compared with part j of
    the others in its group, as GRPO compares whole rollouts. With r_j the reward at its end (for the last, the rest of
    the rollout's) and d the discount, its return is

        R_j = r_j + d · R_(j+1)
    """

    of_token: np.ndarray
    """[T] int: the part of each token."""
    returns: np.ndarray
    """[P] float64."""
    peers: np.ndarray
    """[P] int: parts with one number are compared."""

    @classmethod
    def of(cls, sequences: TrainingSequences, groups: Groups, discount: float) -> TurnParts:
        of_token = np.zeros(sequences.offsets[-1], dtype=np.int64)
        returns: list[float] = []
        peers: list[tuple[int, int]] = []
        order = np.argsort(groups.rollout_of_sequence, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(groups.rollout_of_sequence[order])) + 1):
            cuts, rewards = _cuts_of_rollout(sequences, places)
            rewards.append(sequences.rewards[places[0]] - math.fsum(rewards))
            for number in range(len(rewards) - 2, -1, -1):
                rewards[number] += discount * rewards[number + 1]
            before = len(returns)
            for place, ends in zip(places, cuts, strict=True):
                begin, end = sequences.offsets[place : place + 2]
                of_token[begin:end] = before + np.searchsorted(ends, np.arange(end - begin), side="right")
                before += len(ends)
            returns += rewards
            peers += [(int(groups.group_of_sequence[places[0]]), number) for number in range(len(rewards))]
        _, numbers = np.unique(np.array(peers), axis=0, return_inverse=True)
        return cls(of_token, np.array(returns), numbers.reshape(-1))

    def advantages(self, leave_one_out: bool, normalize_by_std: bool) -> np.ndarray:
        """Return [P] advantages; 0 if all compared returns are equal."""
        sizes = np.bincount(self.peers)
        distances = self.returns - (np.bincount(self.peers, self.returns) / sizes)[self.peers]
        stds = np.sqrt(np.bincount(self.peers, distances**2) / np.maximum(sizes - 1, 1))[self.peers]
        advantages = distances * (sizes / np.maximum(sizes - 1, 1))[self.peers] if leave_one_out else distances
        if normalize_by_std:
            advantages = advantages / (stds + STD_EPSILON)
        return np.where(stds > SPREAD_TOLERANCE, advantages, 0.0)


def _cuts_of_rollout(sequences: TrainingSequences, places: np.ndarray) -> tuple[list[list[int]], list[float]]:
    """Return the positions after rewarded turns for each sequence of a rollout, and the rewards of these turns.

    A turn without a later trained token makes no cut: its reward belongs to the last part.
    """
    cuts = [[end for end, _ in sequences.turn_rewards[place]] for place in places]
    rewards = [reward for place in places for _, reward in sequences.turn_rewards[place]]
    begin, end = sequences.offsets[places[-1] : places[-1] + 2]
    trained = int(np.flatnonzero(sequences.loss_mask[begin:end])[-1]) + 1
    last_cuts = [cut for cut in cuts[-1] if cut < trained]
    removed = len(cuts[-1]) - len(last_cuts)
    return [*cuts[:-1], last_cuts], rewards[: len(rewards) - removed]


def group_baselines(groups: Groups, leave_one_out: bool) -> np.ndarray:
    """[S] mean of the group, or of the others in it (a rollout alone is its own baseline)."""
    means, sizes = groups.of_sequences(groups.means), groups.of_sequences(groups.sizes)
    if not leave_one_out:
        return means
    own = groups.rollout_rewards[groups.rollout_of_sequence]
    others = (means * sizes - own) / np.maximum(sizes - 1, 1)
    return np.where(sizes > 1, others, own)


def group_advantages(rewards: np.ndarray, groups: Groups, leave_one_out: bool, normalize_by_std: bool) -> np.ndarray:
    """[S] advantages of `rewards` ([S]), of which `groups` holds the statistics; 0 in a group without spread."""
    advantages = rewards - group_baselines(groups, leave_one_out)
    if normalize_by_std:
        advantages = advantages / (groups.of_sequences(groups.stds) + STD_EPSILON)
    return np.where(groups.of_sequences(groups.has_spread), advantages, 0.0)


class GDPO(GroupRelative):
    """GDPO: every reward component is compared within its group by itself, then they are added up (arXiv 2601.05242).

    Invariant: a component that is noisy or large cannot drown another, because each is normalised alone; a rollout without one
    of the components is refused, never counted as 0.

        A = Σ_c weight_c · GRPO's advantage of component c,        then over the iteration's rollouts (A − mean) / (std + 1e-6)

        components of a group of two      format 1 0   correct 0 0      GRPO sees 1 0 and cannot know which part paid
    """

    def __init__(self, config: GDPOConfig) -> None:
        super().__init__(config)
        self.weights, self.normalize_batch = config.weights, config.normalize_batch

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        total = np.zeros(len(sequences))
        for name, weight in self._components(sequences).items():
            values = sequences.reward_components[name]
            of_component = Groups.of(sequences, values)
            total += weight * group_advantages(values, of_component, self.leave_one_out, self.normalize_by_std)
        if not self.normalize_batch:
            return total
        teaching = self.trainable_sequences(sequences, groups)
        by_rollout = groups.per_rollout(total)[groups.per_rollout(teaching.astype(float)) > 0]
        if len(by_rollout) < 2:
            return total
        return np.where(teaching, (total - by_rollout.mean()) / (by_rollout.std(ddof=1) + STD_EPSILON), 0.0)

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        """Return True if any component has spread: the sum may be equal although its parts differ."""
        spread = [Groups.of(sequences, sequences.reward_components[name]) for name in self._components(sequences)]
        return np.logical_or.reduce([part.of_sequences(part.has_spread) for part in spread])

    def _components(self, sequences: TrainingSequences) -> dict[str, float]:
        """Weight of each component, by name; every one of them is known for every sequence."""
        components = sequences.reward_components
        weights = self.weights or dict.fromkeys(components, 1.0)
        if len(weights) < 2:
            raise DataError(
                f"train.algorithm.kind is gdpo, which needs two or more reward components, but the rollouts have "
                f"{', '.join(components) or 'none'}. Let the environment's verdict give reward_components, or set kind to grpo."
            )
        for name in weights:
            values = components.get(name, np.full(len(sequences), np.nan))
            if len(missing := np.flatnonzero(~np.isfinite(values))):
                raise DataError(
                    f"sequence {sequences.sequence_ids[missing[0]]!r} has no finite reward component {name!r} "
                    f"({len(missing)} of {len(sequences)} sequences; found: {', '.join(components) or 'none'}). The "
                    "environment must return it for every rollout, or train.algorithm.weights must not name it."
                )
        return weights


class ReinforcePlusPlus(PolicyGradientAlgorithm):
    """REINFORCE++: a critic-free policy gradient with the KL as a reward of each token (arXiv 2501.03262).

    Invariant: a rollout's last token gets the reward and each token pays for its own KL, so a token's return is the sum
    of later ones. The advantages of the iteration's trained tokens have mean 0 and variance 1.

        A_t = r − m − β · Σ_{i ≥ t} KL_i            m: the group's mean, with minus_baseline
        A_t ← (A_t − mean) / sqrt(max(variance, 1e-8))        over all trained tokens of the iteration

    Groups without spread are trained on, too: the baseline is the batch, and their KL counts. With minus_baseline, a
    rollout that is alone in its group is omitted, because the mean is its own reward and only its KL would remain.
    """

    kl_of_rollouts = False

    def __init__(self, config: ReinforcePlusPlusConfig) -> None:
        super().__init__(config)
        self.minus_baseline, self.normalize_batch = config.minus_baseline, config.normalize_batch

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        returns = per_token(rewards.values - self.baselines(groups), sequences)
        if rewards.kl is not None:
            returns = returns - to_go(rewards.kl, sequences.offsets)
        if not self.normalize_batch:
            return returns
        left_out = np.repeat(sequences.truncated, sequences.lengths) & self.config.mask_truncated
        trainable = np.repeat(self.trainable_sequences(sequences, groups), sequences.lengths)
        return normalized(returns, sequences.loss_mask & trainable & ~left_out)

    def baselines(self, groups: Groups) -> np.ndarray:
        means = groups.of_sequences(groups.means)
        return means if self.minus_baseline else np.zeros_like(means)

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        return groups.of_sequences(groups.sizes > 1) if self.minus_baseline else np.ones(len(sequences), dtype=bool)


class OnPolicyDistillation(PolicyGradientAlgorithm):
    """On-policy distillation: a teacher judges the policy's own rollouts token by token (arXiv 2306.13649).

    Invariant: a token's advantage is log teacher − log policy, from before the first update and at the same
    temperature; the environment's reward is recorded but not used. In expectation over the policy's samples, this is a
    step down KL(policy ‖ teacher) of the next-token distribution, at each prefix that the policy reached.
    """

    needs_log_probs = True

    def read_rewards(
        self, sequences: TrainingSequences, plain: Groups, inputs: AlgorithmInputs, coefficient: float
    ) -> Rewards:
        if inputs.old is None or inputs.reference is None:
            raise ValueError("distillation needs the log-probabilities of policy and teacher")
        difference = (inputs.old.astype(np.float64) - inputs.reference) * sequences.loss_mask
        metrics = {"teacher_kl": float(difference.sum() / sequences.loss_mask.sum())}
        return Rewards(sequences.rewards, sequences.rewards, difference, metrics)

    def advantages(self, sequences: TrainingSequences, rewards: Rewards, groups: Groups) -> np.ndarray:
        assert rewards.kl is not None, "read_rewards sets it"
        return -rewards.kl

    def trainable_sequences(self, sequences: TrainingSequences, groups: Groups) -> np.ndarray:
        return np.ones(len(sequences), dtype=bool)


class CrossEntropy:
    """Cross-entropy on chosen rollouts: supervised fine-tuning when all are chosen, rejection sampling when the good ones are.

    Invariant: a rollout is chosen or not as a whole, with all its sequences, and the loss is the mean of −cur over the
    generated tokens of the chosen ones; no advantage, no ratio, no engine log-probability enters it.

        rewards of a group 0 1 1 0      all: all four      threshold 1: the second and third      best_of_group: the second
    """

    needs_log_probs = False

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config

    @property
    def loss(self) -> LossSettings:
        config = self.config
        return LossSettings(
            kl_estimator=config.kl_estimator,
            kl_importance_weighting=config.kl_importance_weighting,
            aggregation=config.loss_aggregation,
            fixed_length=config.fixed_length,
        )

    @property
    def needs_reference(self) -> bool:
        return self.config.reference_source is not None

    def compute(self, sequences: TrainingSequences, inputs: AlgorithmInputs = AlgorithmInputs()) -> TokenSignals:
        groups = Groups.of(sequences)
        rewards = groups.rollout_rewards
        chosen = np.ones(len(rewards), dtype=bool)  # [R]
        if not self.config.include_truncated:
            chosen[groups.rollout_of_sequence[sequences.truncated]] = False
        if self.config.reward_threshold is not None:
            chosen &= rewards >= self.config.reward_threshold
        if self.config.select == "best_of_group":
            # Of each group the first of the allowed rollouts with the highest reward, if any is allowed.
            order = np.lexsort((np.arange(len(rewards)), -rewards))
            candidates = order[chosen[order]]
            _, first = np.unique(groups.group_of_rollout[candidates], return_index=True)
            chosen = np.zeros(len(rewards), dtype=bool)
            chosen[candidates[first]] = True
        weights = token_weights(chosen[groups.rollout_of_sequence], sequences)
        coefficient = current_coefficient(self.config, inputs)
        nothing = np.zeros_like(weights)
        columns = TokenColumns(
            advantages=nothing,
            policy_weights=nothing,
            reference_kl_weights=weights * np.float32(coefficient),
            entropy_weights=weights * np.float32(self.config.entropy_coefficient),
            cross_entropy_weights=weights,
        )
        metrics = reward_metrics(sequences, groups) | {"num_selected": float(chosen.sum())}
        if coefficient > 0:
            metrics["kl_coefficient"] = coefficient
        return TokenSignals(columns, metrics)
