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
from roundhouse.compat.nexrl.nexau import BaseNexAURolloutWorker, DefaultNexAURolloutWorker, NexAURolloutWorker
from roundhouse.compat.nexrl.pool import Batch, TrajectoryPool, read_trajectories
from roundhouse.compat.nexrl.resources import (
    ActivityTracker,
    ActivityTrackerProxy,
    NexRLRole,
    RayActorWrapper,
    RayResourceManager,
    execute,
    execute_async,
)

__all__ = [
    "ActivityTracker",
    "ActivityTrackerProxy",
    "AgentEvaluationTarget",
    "AgentRolloutWorker",
    "BaseDataLoader",
    "BaseEvaluationTarget",
    "BaseNexAURolloutWorker",
    "BaseRolloutWorker",
    "Batch",
    "DefaultNexAURolloutWorker",
    "EvaluationRunResult",
    "Evaluator",
    "FileDataLoader",
    "LlmClient",
    "MockDataLoader",
    "MockRolloutWorker",
    "NexAUEvaluationTarget",
    "NexAURolloutWorker",
    "NexRLRole",
    "RayActorWrapper",
    "RayResourceManager",
    "RolloutLimit",
    "SimpleRolloutWorker",
    "StepResult",
    "TraceRolloutWorker",
    "Tracer",
    "TrajectoryPool",
    "execute",
    "execute_async",
    "read_trajectories",
]
