"""Rollout workers, evaluators, data loaders and the trajectory pool with the interfaces of NexRL.

A recipe imports its base classes from here:

    from roundhouse.compat.nexrl import AgentRolloutWorker, EvaluationRunResult, Evaluator
"""

from __future__ import annotations

import importlib
from typing import Any

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
from roundhouse.compat.nexrl.client import BaseDataLoader, FileDataLoader, MockDataLoader, TorchDataLoader
from roundhouse.compat.nexrl.loop import Validator, WeightSyncController
from roundhouse.compat.nexrl.modules import (
    ActivityTracker,
    ActivityTrackerProxy,
    ErrorInfo,
    ErrorReporter,
    ErrorSeverity,
    NexRLModule,
    execute,
    execute_async,
)
from roundhouse.compat.nexrl.nexau import BaseNexAURolloutWorker, DefaultNexAURolloutWorker, NexAURolloutWorker
from roundhouse.compat.nexrl.plain import LLMServiceClient
from roundhouse.compat.nexrl.pool import (
    Batch,
    ModelTag,
    Trajectory,
    TrajectoryPool,
    TrajectoryPoolInstance,
    read_trajectories,
)
from roundhouse.compat.nexrl.resources import NexRLRole, RayActorWrapper, RayResourceManager
from roundhouse.imports import provide_foreign_names

MODULES = frozenset(
    f"nexrl.{name}"
    for name in (
        "activity_tracker", "algorithm", "algorithm.core_algos", "base_module", "controller", "data_loader",
        "data_loader.data_loader", "data_loader.torch_data_loader", "error_reporter", "executor", "llm_service_client", "mock",
        "nexrl_types", "ray_resource_manager", "rollout_worker", "rollout_worker.agent_rollout_worker",
        "rollout_worker.base_nexau_rollout_worker", "rollout_worker.base_rollout_worker",
        "rollout_worker.simple_rollout_worker", "train_service_client", "trainer", "trainer.base_trainer",
        "trainer.remote_api_trainer", "trainer.self_hosted_trainer", "trajectory_pool", "utils", "utils.logging_utils",
        "validator", "weight_sync", "weight_sync.weight_sync_controller",
    )
)  # fmt: skip
"""NexRL's module names that recipes can import; this package provides their contents."""
_LATER = {
    "MockTrainServiceClient": "roundhouse.compat.nexrl.mock_service",
    **dict.fromkeys(
        ("NexRLController", "MODULE_REGISTRY", "set_logging_basic_config"), "roundhouse.compat.nexrl.controller"
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
        "roundhouse.compat.nexrl.trainers",
    ),
}
"""Names by their module, which is imported when one is asked for: workers need neither the trainer nor the configuration."""


def __getattr__(name: str) -> Any:
    if name == "TrainServiceClient":
        return importlib.import_module("roundhouse.training.service.verbs").TrainService
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


provide_foreign_names()

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
