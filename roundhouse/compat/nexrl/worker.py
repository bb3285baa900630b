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
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Any, ClassVar, Literal

from roundhouse.compat.nexrl.evaluation import AgentEvaluationTarget, EvaluationRunResult, Evaluator, is_async
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
