"""Evaluators: from a data item and what the agent answered to a reward.

Invariants: a reward lies in [0, 1] and every metric is a finite number, or there is no result; an evaluator that raises fails
the rollout, which then has no reward.

    class Exact(Evaluator):
        def evaluate(self, data, target):
            right = target.final_answer.strip() == data["ground_truth"]
            return EvaluationRunResult(reward=float(right), ground_truth=data["ground_truth"])
"""

from __future__ import annotations

import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BaseEvaluationTarget:
    """What is judged."""

    final_answer: str


@dataclass(frozen=True, slots=True)
class AgentEvaluationTarget(BaseEvaluationTarget):
    """What is judged of an agent's run."""

    observation: list[dict[str, Any]] = field(default_factory=list)
    """Everything that happened: the model calls, or the spans of a trace."""
    is_truncated: bool = False
    """A limit of turns or tokens ended the run."""


NexAUEvaluationTarget = AgentEvaluationTarget
"""The name that NexRL's recipes know."""


@dataclass(frozen=True, slots=True)
class EvaluationRunResult:
    """What an evaluator says.

    Raises:
        ValueError: the reward is no number in [0, 1], or a metric no finite number.
    """

    reward: float = 0.0
    ground_truth: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Scalars to report, by name."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Anything more; it reaches whoever asked for the rollout, and is not stored."""

    def __post_init__(self) -> None:
        if not _finite(self.reward) or not 0 <= self.reward <= 1:
            raise ValueError(f"reward is {self.reward!r}; it must be a number in [0, 1]")
        for name, value in self.metrics.items():
            if not _finite(value):
                raise ValueError(
                    f"metrics[{name!r}] is {value!r}; it must be a finite number (put the rest in extra_info)"
                )


class Evaluator(ABC):
    """Judges answers. One evaluator serves all rollouts, from several threads; it keeps no state between calls."""

    @abstractmethod
    def evaluate(
        self, data: dict[str, Any], evaluation_target: BaseEvaluationTarget
    ) -> EvaluationRunResult | Awaitable[EvaluationRunResult]:
        """Judge an answer. May be `async`; as a plain function it runs in a thread, so that it may take its time."""


class AnswerTag(Evaluator):
    """1 exactly when the text between the last <answer> and </answer> is the item's `ground_truth`; outer space is ignored."""

    def evaluate(self, data: dict[str, Any], evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        truth = str(data["ground_truth"]).strip()
        # From a beginning after the last end, the pattern would look for one to the end of the text.
        closed, end, _ = evaluation_target.final_answer.rpartition("</answer>")
        given = _ANSWER.findall(closed + end)
        right = bool(given) and given[-1].strip() == truth
        return EvaluationRunResult(float(right), truth, {"answered": float(bool(given))})


def is_async(evaluator: Evaluator) -> bool:
    return inspect.iscoroutinefunction(evaluator.evaluate)


def _finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
