"""Environments written as the code that plays a rollout: workers, evaluators and data loaders, as NexRL has them.

A recipe imports what it needs from here:

    from roundhouse.gym.workers import AgentRolloutWorker, EvaluationRunResult, Evaluator
"""

from roundhouse.gym.workers.agent import AgentRolloutWorker
from roundhouse.gym.workers.data import BaseDataLoader, FileDataLoader, MockDataLoader
from roundhouse.gym.workers.evaluation import (
    AgentEvaluationTarget,
    BaseEvaluationTarget,
    EvaluationRunResult,
    Evaluator,
    NexAUEvaluationTarget,
)
from roundhouse.gym.workers.llm import LlmClient, RolloutLimit
from roundhouse.gym.workers.mock import MockRolloutWorker
from roundhouse.gym.workers.simple import SimpleRolloutWorker
from roundhouse.gym.workers.trace import Tracer, TraceRolloutWorker
from roundhouse.gym.workers.worker import BaseRolloutWorker, StepResult

__all__ = [
    "AgentEvaluationTarget",
    "AgentRolloutWorker",
    "BaseDataLoader",
    "BaseEvaluationTarget",
    "BaseRolloutWorker",
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
]
