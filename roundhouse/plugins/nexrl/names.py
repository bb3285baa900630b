"""The names of NexRL, for recipes."""

from __future__ import annotations

import importlib
from typing import Any

from roundhouse.plugins.nexrl.base import (
    AgentEvaluationTarget,
    BaseEvaluationTarget,
    BaseRolloutWorker,
    EvaluationRunResult,
    Evaluator,
    NexAUEvaluationTarget,
    StepResult,
)
from roundhouse.plugins.nexrl.built_in import (
    AgentRolloutWorker,
    MockRolloutWorker,
    SimpleRolloutWorker,
    Tracer,
    TraceRolloutWorker,
)
from roundhouse.plugins.nexrl.client import BaseDataLoader, FileDataLoader, MockDataLoader, TorchDataLoader
from roundhouse.plugins.nexrl.loop import Validator, WeightSyncController
from roundhouse.plugins.nexrl.modules import (
    ActivityTracker,
    ActivityTrackerProxy,
    ErrorInfo,
    ErrorReporter,
    ErrorSeverity,
    NexRLModule,
    execute,
    execute_async,
)
from roundhouse.plugins.nexrl.nexau import BaseNexAURolloutWorker, DefaultNexAURolloutWorker, NexAURolloutWorker
from roundhouse.plugins.nexrl.plain import LLMServiceClient
from roundhouse.plugins.nexrl.pool import (
    Batch,
    ModelTag,
    Trajectory,
    TrajectoryPool,
    TrajectoryPoolInstance,
    read_trajectories,
)
from roundhouse.plugins.nexrl.resources import NexRLRole, RayActorWrapper, RayResourceManager
from roundhouse.plugins.programs.model_calls import LlmClient, RolloutLimit

_LATER = {
    "MockTrainServiceClient": "roundhouse.plugins.nexrl.mock_service",
    **dict.fromkeys(
        ("NexRLController", "MODULE_REGISTRY", "set_logging_basic_config"), "roundhouse.plugins.nexrl.controller"
    ),
    **dict.fromkeys(
        (
            "BaseTrainer",
            "RemoteApiCrossEntropyTrainer",
            "RemoteApiGrpoTrainer",
            "RemoteApiTrainer",
            "SelfHostedGrpoTrainer",
            "SelfHostedTrainer",
            "compute_grpo_advantage_for_trajectories",
            "log_grpo_metrics",
        ),
        "roundhouse.plugins.nexrl.trainers",
    ),
}
"""Names by their module, which is imported when one is asked for: workers need neither the trainer nor the configuration."""


def __getattr__(name: str) -> Any:
    if name == "TrainServiceClient":
        return importlib.import_module("roundhouse.training.service.verbs").TrainService
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "ErrorInfo",
    "ErrorReporter",
    "ErrorSeverity",
    "EvaluationRunResult",
    "Evaluator",
    "FileDataLoader",
    "LLMServiceClient",
    "LlmClient",
    "MockDataLoader",
    "MockRolloutWorker",
    "ModelTag",
    "NexAUEvaluationTarget",
    "NexAURolloutWorker",
    "NexRLModule",
    "NexRLRole",
    "RayActorWrapper",
    "RayResourceManager",
    "RolloutLimit",
    "SimpleRolloutWorker",
    "StepResult",
    "TorchDataLoader",
    "TraceRolloutWorker",
    "Tracer",
    "Trajectory",
    "TrajectoryPool",
    "TrajectoryPoolInstance",
    "Validator",
    "WeightSyncController",
    "execute",
    "execute_async",
    "read_trajectories",
]
