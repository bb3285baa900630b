"""The algorithms, one module an idea, each a source of columns (`roundhouse.training.algorithm`).

group_relative        grpo, dr_grpo, rloo, dapo, gspo, cispo: they differ in constants alone
gdpo                  an advantage for each reward component
reinforce_plus_plus   KL in the reward of each token, normalised over the batch
cross_entropy         likelihood of chosen rollouts
distillation          a teacher's opinion of each token
custom                one of your own, by `module:Class`
"""

from __future__ import annotations

from roundhouse.config.algorithms import (
    AlgorithmConfig,
    CrossEntropyConfig,
    CustomAlgorithmConfig,
    DistillationConfig,
    GDPOConfig,
    ReinforcePlusPlusConfig,
)
from roundhouse.training.algorithm import Algorithm
from roundhouse.training.algorithms.cross_entropy import CrossEntropy
from roundhouse.training.algorithms.custom import load_custom
from roundhouse.training.algorithms.distillation import OnPolicyDistillation
from roundhouse.training.algorithms.gdpo import GDPO
from roundhouse.training.algorithms.group_relative import GroupRelative
from roundhouse.training.algorithms.reinforce_plus_plus import ReinforcePlusPlus


def build(config: AlgorithmConfig) -> Algorithm:
    """The algorithm of a section.

    Raises:
        ConfigError: a custom one cannot be imported or made.
    """
    if isinstance(config, CustomAlgorithmConfig):
        return load_custom(config)
    if isinstance(config, CrossEntropyConfig):
        return CrossEntropy(config)
    if isinstance(config, DistillationConfig):
        return OnPolicyDistillation(config)
    if isinstance(config, ReinforcePlusPlusConfig):
        return ReinforcePlusPlus(config)
    if isinstance(config, GDPOConfig):
        return GDPO(config)
    return GroupRelative(config)
