"""Environments written as the code that plays a rollout: workers, evaluators and data loaders, as NexRL has them.

A recipe imports what it needs from here:

    from roundhouse.compat.nexrl import AgentRolloutWorker, EvaluationRunResult, Evaluator
"""

from roundhouse.compat.nexrl.agent import AgentRolloutWorker
from roundhouse.compat.nexrl.data import BaseDataLoader, FileDataLoader, MockDataLoader
from roundhouse.compat.nexrl.evaluation import (
    AgentEvaluationTarget,
    BaseEvaluationTarget,
    EvaluationRunResult,
    Evaluator,
    NexAUEvaluationTarget,
)
from roundhouse.compat.nexrl.llm import LlmClient, RolloutLimit
from roundhouse.compat.nexrl.mock import MockRolloutWorker
from roundhouse.compat.nexrl.simple import SimpleRolloutWorker
from roundhouse.compat.nexrl.trace import Tracer, TraceRolloutWorker
from roundhouse.compat.nexrl.worker import BaseRolloutWorker, StepResult

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
