"""GDPO: every reward component is compared within its group by itself, then they are added up (arXiv 2601.05242).

Invariant: a component that is noisy or large cannot drown another, because each is normalised alone; a rollout without one of
the components is refused, never counted as 0.

    A = Σ_c weight_c · GRPO's advantage of component c,        then over the iteration's rollouts (A − mean) / (std + 1e-6)

    components of a group of two      format 1 0   correct 0 0      GRPO sees 1 0 and could not tell which part paid
"""

from __future__ import annotations

import numpy as np

from roundhouse.config.algorithms import GDPOConfig
from roundhouse.errors import DataError
from roundhouse.training.algorithms import register
from roundhouse.training.algorithms.group_relative import STD_EPSILON, GroupRelative, group_advantages
from roundhouse.training.algorithms.policy_gradient import Rewards
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.rewards import Groups


@register(GDPOConfig)
class GDPO(GroupRelative):
    """The sum of the components' group-relative advantages; every deviation has the divisor n − 1."""

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
        """Where any component has spread: the sum may be equal although its parts are not."""
        spread = [Groups.of(sequences, sequences.reward_components[name]) for name in self._components(sequences)]
        return np.logical_or.reduce([part.of_sequences(part.has_spread) for part in spread])

    def _components(self, sequences: TrainingSequences) -> dict[str, float]:
        """Weight of each component, by name; every one of them is known for every sequence."""
        found = sequences.reward_components
        weights = self.weights or dict.fromkeys(found, 1.0)
        if len(weights) < 2:
            raise DataError(
                f"train.algorithm.kind is gdpo, which needs two or more reward components, but the rollouts have "
                f"{', '.join(found) or 'none'}. Let the environment's verdict give reward_components, or set kind to grpo."
            )
        for name in weights:
            values = found.get(name, np.full(len(sequences), np.nan))
            if len(missing := np.flatnonzero(~np.isfinite(values))):
                raise DataError(
                    f"sequence {sequences.sequence_ids[missing[0]]!r} has no finite reward component {name!r} "
                    f"({len(missing)} of {len(sequences)} sequences; found: {', '.join(found) or 'none'}). The "
                    "environment has to give it for every rollout, or train.algorithm.weights must not name it."
                )
        return weights
