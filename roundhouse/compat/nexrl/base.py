"""The base of rollout workers: an environment written as the code that plays one rollout.

Invariants: one worker object plays one rollout, so what it keeps on `self` is that rollout's alone; a rollout has a reward
exactly when the worker put a trajectory and its evaluator judged it.

    class Quiz(BaseRolloutWorker):
        async def run_agent(self, task):
            answer = await self.llm.completion(self.format_task_query(task))
            return await self.put_trajectory(task, answer["response"])

What `step` returns is the outcome:

    "success"      the trajectory that was put counts                                         completed or truncated
    "fail"         the worker gave up on the task                                             failed (data)
    "re-rollout"   the same again, for a reason that may pass                                 failed (infra): tried again
    None           it failed before there was a trajectory, such as for want of a field       failed (data)

Evaluators: from a data item and what the agent answered to a reward.

Invariants: a reward lies in [0, 1] and every metric is a finite number, or there is no result; an evaluator that raises fails
the rollout, which then has no reward.

    class Exact(Evaluator):
        def evaluate(self, data, target):
            right = target.final_answer.strip() == data["ground_truth"]
            return EvaluationRunResult(reward=float(right), ground_truth=data["ground_truth"])
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, ClassVar, Literal

from roundhouse.compat.nexrl.llm import LlmClient
from roundhouse.errors import DataError, InfraError
from roundhouse.rollout.failures import VerifierFailed

QUERY_FIELDS = ("prompt", "query", "question")


class StepResult(StrEnum):
    """What a worker says of a task. None, beside these, says that there never was a trajectory."""

    SUCCESS = "success"
    FAIL = "fail"
    RE_ROLLOUT = "re-rollout"


class WorkerFailed(DataError):
    """The worker raised, gave up, or its result makes no sense."""


class NoTrajectory(DataError):
    """The worker failed before there was a trajectory."""


class ReRollout(InfraError):
    """The worker asks for the same task again."""


class BaseRolloutWorker(ABC):
    """Plays one rollout; see the module's docstring for an example."""

    evaluator: Evaluator | None = None
    """The default evaluator of the class; environment.evaluator overrides it."""
    restoration: ClassVar[Literal["none", "replay"]] = "none"
    """`replay`: after an interruption the worker plays from the start, and its finished model calls are answered from the
    record. For workers that make one call after another, and whose own work (tools, services) may be done twice."""

    def __init__(self, llm: LlmClient, evaluator: Evaluator | None = None) -> None:
        """Further keyword arguments of a subclass are environment.parameters. `llm` is for the rollout, not for this."""
        self.llm = llm
        if evaluator is not None:
            self.evaluator = evaluator
        self.result: EvaluationRunResult | None = None
        self.is_truncated = False
        self.trained_on = True
        """False masks the rollout: it keeps its reward and is not trained on."""

    async def step(self, task: dict[str, Any]) -> str | None:
        """Play the task: a data item with `group_id`, `run_id` and `task_id`."""
        return await self.run_agent(task)

    @abstractmethod
    async def run_agent(self, task: dict[str, Any]) -> str | None:
        """Play the task and put its trajectory; what it returns is explained above."""

    def format_task_query(self, item: dict[str, Any]) -> str:
        """The prompt for a data item.

        Raises:
            KeyError: it has none of prompt, query and question.
        """
        for name in QUERY_FIELDS:
            if item.get(name):
                return str(item[name])
        raise KeyError(f"the item has none of {', '.join(QUERY_FIELDS)}: override format_task_query")

    def get_train_loss_mask(self, infos: list[dict[str, Any]]) -> list[bool]:
        """Which model calls are trained on, one a call (`LlmClient.infos`). What is left out stays in later prompts."""
        return [True] * len(infos)

    async def put_trajectory(
        self,
        task: dict[str, Any],
        final_answer: str,
        *,
        observation: list[dict[str, Any]] | None = None,
        is_truncated: bool = False,
        result: EvaluationRunResult | None = None,
    ) -> str:
        """Have the answer judged (or give `result` without) and hand the rollout in; "success".

        Raises:
            VerifierFailed: there is no evaluator, it raised, or what it returned is no result.
        """
        self.is_truncated = is_truncated or bool(self.llm.limit)
        seen = self.llm.infos if observation is None else observation
        if result is None:
            result = await self._evaluated(task, AgentEvaluationTarget(final_answer, seen, self.is_truncated))
        self.result = result
        return StepResult.SUCCESS

    async def cut_short(self, task: dict[str, Any], limit: str) -> str:
        """The run was ended by a limit that it did not catch: judge the newest reply."""
        answer = self.llm.infos[-1]["response"] if self.llm.infos else ""
        self.llm.limit = limit
        return await self.put_trajectory(task, answer, is_truncated=True)

    async def _evaluated(self, task: dict[str, Any], target: AgentEvaluationTarget) -> EvaluationRunResult:
        evaluator = self.evaluator
        if evaluator is None:
            raise VerifierFailed(f"{type(self).__name__} has no evaluator: set environment.evaluator.")
        try:
            if is_async(evaluator):
                told: Any = evaluator.evaluate(task, target)
            else:
                told = await asyncio.to_thread(evaluator.evaluate, task, target)
            result = await told if inspect.isawaitable(told) else told
        except (InfraError, DataError):
            raise
        except Exception as error:  # the evaluator's code ends here; its failure becomes an outcome
            raise VerifierFailed(f"{type(evaluator).__name__} raised {error!r}") from error
        if not isinstance(result, EvaluationRunResult):
            raise VerifierFailed(
                f"{type(evaluator).__name__} returned a {type(result).__name__}; it must return an EvaluationRunResult."
            )
        return result


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
