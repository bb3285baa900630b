"""Base classes of rollout workers, the client for their model calls, and evaluators.

Invariant: one worker object plays one rollout, so the attributes of `self` belong to that rollout alone. A rollout has
a reward exactly if the worker put a trajectory and its evaluator judged it.

    class Quiz(BaseRolloutWorker):
        async def run_agent(self, task):
            answer = await self.llm.completion(self.format_task_query(task))
            return await self.put_trajectory(task, answer["response"])

    class Exact(Evaluator):
        def evaluate(self, data, target):
            right = target.final_answer.strip() == data["ground_truth"]
            return EvaluationRunResult(reward=float(right), ground_truth=data["ground_truth"])

`roundhouse.plugins.nexrl.plain` has the same with plain functions, as in NexRL.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, ClassVar, Literal

from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.plugins.nexrl.modules import ActivityTracker, NexRLModule, execute
from roundhouse.plugins.nexrl.plain import LLMServiceClient, PlainClient, WorkerConfig, WorkerThread
from roundhouse.plugins.programs.model_calls import LlmClient
from roundhouse.rollout.protocol import VerifierFailed, call_verifier

QUERY_FIELDS = ("prompt", "query", "question")


class StepResult(StrEnum):
    """Outcome of a task, as the worker's `step` returns it; to the right, the status of the rollout.

        "success"      the trajectory counts                                                completed or truncated
        "fail"         the worker gave up the task                                          failed (data)
        "re-rollout"   repeat, because the reason may pass                                  failed (infra): tried again
        None           it failed before a trajectory existed, such as for a missing field   failed (data)

    An outcome of None is not a member: `step` returns Python's None.
    """

    SUCCESS = "success"
    FAIL = "fail"
    RE_ROLLOUT = "re-rollout"


class WorkerFailed(DataError):
    """The worker raised, gave up, or its result makes no sense."""


class NoTrajectory(DataError):
    """The worker failed before there was a trajectory."""


class ReRollout(InfraError):
    """The worker asks for the same task again."""


log = logging.getLogger(__name__)


class BaseRolloutWorker(NexRLModule):
    """Player of one rollout; see the module's docstring for an example.

    In a loop of your own, made with NexRL's configuration, it takes tasks from its data loader and puts trajectories
    into its pool, in a thread (`run`).
    """

    evaluator: Evaluator | None = None
    """The default evaluator of the class; environment.evaluator overrides it."""
    restoration: ClassVar[Literal["none", "replay"]] = "none"
    """`replay`: after an interruption the worker plays from the start, and the record answers its finished model calls.
    For workers that make one call after another and may repeat their other work (tools, services)."""

    calls_user_code: ClassVar[bool] = False
    """The class calls code of the user's also without a subclass, such as tools that a file names."""

    def __init__(self, llm: LlmClient | Mapping[str, Any], evaluator: Evaluator | None = None) -> None:
        """Further keyword arguments of a subclass are environment.parameters; a subclass with the one argument `config` gets
        them as that. `llm` is for the rollout, not for this."""
        policy: Any = llm
        self._thread: WorkerThread | None = None
        """Thread of a loop that the user runs."""
        self._llm_client: Any = None
        """The name that NexRL's recipes know."""
        if isinstance(llm, Mapping):
            self._config = llm
            policy, evaluator = llm.made_with if isinstance(llm, WorkerConfig) else (None, evaluator)
            if policy is None and not isinstance(llm, WorkerConfig):
                self._thread, self._llm_client = WorkerThread(self), LLMServiceClient(llm)
        self.llm: LlmClient = policy
        self._llm_client = self._llm_client or PlainClient(policy)
        self._activity_tracker = ActivityTracker(post=self._keep_metrics)
        self.logged: dict[str, float] = {}
        """Numbers that the worker posted to an experiment logger: metrics of the rollout."""
        self._task: dict[str, Any] = {}
        self._taken = self.put_back = False
        if evaluator is not None:
            self.evaluator = evaluator
        self.result: EvaluationRunResult | None = None
        self.is_truncated = False
        self.trained_on = True
        """False masks the rollout: it keeps its reward and is not trained on."""
        self.is_validate = False
        """The rollout is of an evaluation, and is not trained on."""
        self.dataloader: Any = ()
        self.validate_dataloader: Any = ()
        self.trajectory_pool: Any = None
        self.validator: Any = None

    def set_module_references(
        self,
        trajectory_pool: Any = None,
        dataloader: Any = (),
        weight_sync_controller: Any = None,
        validate_dataloader: Any = (),
        validator: Any = None,
    ) -> None:
        """Called before `step`. In a run: the items of both splits, to look at, while the run's plan selects the task; pool,
        controller and validator are the run's own, and None here."""
        self.dataloader, self.validate_dataloader = dataloader, validate_dataloader
        self.trajectory_pool, self.validator = trajectory_pool, validator
        self._llm_client.set_weight_sync_controller(weight_sync_controller)

    def run(self) -> None:
        """Start a loop of your own, in a thread: tasks from the data loader, trajectories into the pool or the validator.

        Raises:
            ConfigError: the worker plays a run's rollout, lacks a module or a tracker, or its `step` is `async`.
        """
        if self._thread is None:
            raise ConfigError(
                f"{type(self).__name__}.run: in a run the collector gives each worker its task. Leave it out."
            )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread of `run` after its task."""
        if self._thread is not None:
            self._thread.stop()

    def _keep_metrics(self, backend: str, posted: dict[str, Any]) -> None:
        """Keep the numbers of a post as metrics of the rollout; a message goes to the log."""
        data = posted.get("data")
        numbers = {str(name): value for name, value in data.items()} if isinstance(data, Mapping) else {}
        self.logged |= {name: float(value) for name, value in numbers.items() if _finite(value)}
        if rest := {name: value for name, value in posted.items() if name not in ("data", "step")}:
            log.info("%s posted to %s: %s", type(self).__name__, backend, rest)

    def begin_validate(self) -> None:
        """Called before the `step` of an evaluation."""
        self.is_validate = True

    def end_validate(self) -> None:
        """Called after it."""
        self.is_validate = False

    async def play(self, task: dict[str, Any]) -> str | None:
        """Return the result of `step`, or of the class's `run_agent`, as a plain or an `async` function."""
        self._task = task
        step = self.run_agent if type(self).step is BaseRolloutWorker.step else self.step
        return await (step(task) if inspect.iscoroutinefunction(step) else self._llm_client.play(step, task))

    async def step(self, task: dict[str, Any]) -> str | None:
        """Play the task: a data item with `group_id`, `run_id` and `task_id`. A plain function plays in a thread, with
        `_llm_client` and `_put_trajectory`."""
        return await self.run_agent(task)

    async def run_agent(self, task: dict[str, Any]) -> str | None:
        """Play the task and put its trajectory. The module's docstring explains the result."""
        raise NotImplementedError(f"{type(self).__name__} defines neither step nor run_agent")

    def format_task_query(self, data_item: dict[str, Any]) -> str:
        """Return the prompt for a data item.

        Raises:
            KeyError: the item lacks all of prompt, query and question.
        """
        for name in QUERY_FIELDS:
            if data_item.get(name):
                return str(data_item[name])
        raise KeyError(f"the item lacks {', '.join(QUERY_FIELDS)}: override format_task_query")

    def get_train_loss_mask(self, trajectory_infos: list[dict[str, Any]]) -> list[bool]:
        """Return for each model call (`LlmClient.infos`) whether it is trained on. A masked call stays in later
        prompts."""
        return [True] * len(trajectory_infos)

    async def put_trajectory(
        self,
        task: dict[str, Any],
        final_answer: str,
        *,
        observation: list[dict[str, Any]] | None = None,
        is_truncated: bool = False,
        result: EvaluationRunResult | None = None,
    ) -> str:
        """Have the answer judged (or take `result`), hand the rollout in, and return "success".

        Raises:
            VerifierFailed: no evaluator exists, it raised, or its result is invalid.
        """
        self.is_truncated = is_truncated or bool(self.llm.limit)
        seen = self.llm.infos if observation is None else observation
        if result is None:
            target = AgentEvaluationTarget(final_answer, seen, self.is_truncated)
            evaluator = self.evaluator
            if evaluator is None:
                raise VerifierFailed(f"{type(self).__name__} has no evaluator: set environment.evaluator.")
            name = evaluator_name(evaluator)
            result = await call_verifier(name, evaluator.evaluate, task, target)
            if not isinstance(result, EvaluationRunResult):
                raise VerifierFailed(
                    f"{name} returned a {type(result).__name__}; it must return an EvaluationRunResult."
                )
        self.result = result
        return StepResult.SUCCESS

    def _get_rollout_task(self) -> dict[str, Any] | None:
        """Return the next task: in a run the worker's own, once; in a loop of your own the loader's, None after a pause."""
        if self._thread is not None:
            return self._thread.next_task()
        task, self._taken = (None if self._taken else self._task), True
        return task

    def _put_rollout_task(self, task: dict[str, Any]) -> bool:
        """Return a task to be played again: in a run the result of the rollout is then "re-rollout"."""
        if self._thread is not None:
            execute((self.validate_dataloader if self.is_validate else self.dataloader).add_item_front, task)
        self.put_back = True
        return True

    def _put_trajectory(self, trajectory: dict[str, Any]) -> Any:
        """Hand in NexRL's form of a trajectory: its `response` is judged, unless it has a `reward`; its tokens are those of the
        model calls. An `async` worker awaits it. In a loop of your own it goes to the pool, or to the validator, as it is."""
        if self._thread is not None:
            return execute((self.validator if self.is_validate else self.trajectory_pool).put_trajectory, trajectory)
        result = None
        if (reward := trajectory.get("reward")) is not None:
            result = EvaluationRunResult(reward, str(trajectory.get("ground_truth", "")))
        answer = str(trajectory.get("response") or "")
        return self._llm_client.wait(self.put_trajectory(self._task, answer, result=result))

    _put_validate_trajectory = _put_trajectory

    def _get_validate_task(self) -> dict[str, Any]:
        """Return the task of an evaluation: the argument of `step`."""
        return self._task

    @property
    def _is_running_validate(self) -> bool:
        return self.is_validate

    async def cut_short(self, task: dict[str, Any], limit: str) -> str:
        """The run was ended by a limit that it did not catch: judge the newest reply."""
        answer = self.llm.infos[-1]["response"] if self.llm.infos else ""
        self.llm.limit = limit
        return await self.put_trajectory(task, answer, is_truncated=True)


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BaseEvaluationTarget:
    """Input of an evaluator."""

    final_answer: str


@dataclass(frozen=True, slots=True)
class AgentEvaluationTarget(BaseEvaluationTarget):
    """Input of an evaluator of an agent's run."""

    observation: list[dict[str, Any]] = field(default_factory=list)
    """Everything that happened: the model calls, or the spans of a trace."""
    is_truncated: bool = False
    """A limit of turns or tokens ended the run."""


NexAUEvaluationTarget = AgentEvaluationTarget
"""The name that NexRL's recipes know."""


@dataclass(frozen=True, slots=True)
class EvaluationRunResult:
    """Result of an evaluator.

    Raises:
        ValueError: the reward is not a number in [0, 1], or a metric is not finite.
    """

    reward: float = 0.0
    ground_truth: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Scalars to report, by name."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Anything more; it is returned to the caller of the rollout, and not stored."""

    def __post_init__(self) -> None:
        if not _finite(self.reward) or not 0 <= self.reward <= 1:
            raise ValueError(f"reward is {self.reward!r}; it must be a number in [0, 1]")
        for name, value in self.metrics.items():
            if not _finite(value):
                raise ValueError(
                    f"metrics[{name!r}] is {value!r}; it must be a finite number (put the rest in extra_info)"
                )


class Evaluator(ABC):
    """Judge of answers. One evaluator serves all rollouts, from several threads; it keeps no state between calls.

    A reward is in [0, 1] and every metric is a finite number, or the result is refused. If an evaluator raises, the
    rollout fails without a reward.
    """

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__name__

    @abstractmethod
    def evaluate(
        self, data: dict[str, Any], evaluation_target: BaseEvaluationTarget
    ) -> EvaluationRunResult | Awaitable[EvaluationRunResult]:
        """Judge an answer. May be `async`; as a plain function it runs in a thread, so that it may take its time."""


def evaluator_name(evaluator: object) -> str:
    """Return the name of an evaluator for messages; any object with `evaluate` serves, also without a name."""
    return str(getattr(evaluator, "name", type(evaluator).__name__))


class AnswerTag(Evaluator):
    """1 exactly when the text between the last <answer> and </answer> is the item's `ground_truth`; outer space is ignored."""

    def evaluate(self, data: dict[str, Any], evaluation_target: BaseEvaluationTarget) -> EvaluationRunResult:
        truth = str(data["ground_truth"]).strip()
        # From a beginning after the last end, the pattern would look for one to the end of the text.
        closed, end, _ = evaluation_target.final_answer.rpartition("</answer>")
        answers = _ANSWER.findall(closed + end)
        right = bool(answers) and answers[-1].strip() == truth
        return EvaluationRunResult(float(right), truth, {"answered": float(bool(answers))})


def _finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
