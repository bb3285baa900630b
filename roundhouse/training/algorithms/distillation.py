"""On-policy distillation: the policy's own rollouts, judged token by token by a teacher (arXiv 2306.13649).

Invariant: a token's advantage is log teacher − log policy, from before the first update and under the same temperature; the
environment's reward is recorded and has no part in it. In expectation over the policy's samples, this is a step down
KL(policy ‖ teacher) of the next-token distribution, at each prefix that the policy came to.
"""

from __future__ import annotations

import numpy as np

from roundhouse.config.algorithms import DistillationConfig
from roundhouse.training.algorithm import AlgorithmInputs
from roundhouse.training.algorithms import register
from roundhouse.training.algorithms.policy_gradient import PolicyGradientAlgorithm, Rewards
from roundhouse.training.batch import TrainingSequences
from roundhouse.training.rewards import Groups


@register(DistillationConfig)
class OnPolicyDistillation(PolicyGradientAlgorithm):
    """Reads the teacher's log-probabilities from `AlgorithmInputs.reference`."""

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
