"""Environments written as the code that plays a rollout: workers, evaluators, data loaders and the pool, as NexRL has them.

A recipe imports what it needs from here:

    from roundhouse.compat.nexrl import AgentRolloutWorker, EvaluationRunResult, Evaluator
"""

from roundhouse.compat.nexrl.base import (
    AgentEvaluationTarget,
    BaseEvaluationTarget,
    BaseRolloutWorker,
    EvaluationRunResult,
    Evaluator,
    LlmClient,
    NexAUEvaluationTarget,
    RolloutLimit,
    StepResult,
)
from roundhouse.compat.nexrl.built_in import (
    AgentRolloutWorker,
    MockRolloutWorker,
    SimpleRolloutWorker,
    Tracer,
    TraceRolloutWorker,
)
from roundhouse.compat.nexrl.client import BaseDataLoader, FileDataLoader, MockDataLoader
from roundhouse.compat.nexrl.pool import Batch, TrajectoryPool, read_trajectories

__all__ = [
    "AgentEvaluationTarget",
    "AgentRolloutWorker",
    "BaseDataLoader",
    "BaseEvaluationTarget",
    "BaseRolloutWorker",
    "Batch",
    "EvaluationRunResult",
    "Evaluator",
    "FileDataLoader",
    "LlmClient",
    "MockDataLoader",
    "MockRolloutWorker",
    "NexAUEvaluationTarget",
    "RolloutLimit",
    "SimpleRolloutWorker",
    "StepResult",
    "TraceRolloutWorker",
    "Tracer",
    "TrajectoryPool",
    "read_trajectories",
]
