"""One rollout by a worker: in the process of its code, and the worker's side of the policy there.

Invariant: the policy's side, `LlmClient`, is always the collector's. A worker in another process asks it for each model call,
and records the same call for itself, so that `infos`, `limit` and `items` are those of the collector.

    collector   LlmClient.ask ──> engine        the turns, the limits, the outcome
                   ^      │ completion
    process     AskedLlm.ask <── worker.step    user code: worker, tools, evaluator
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.environments.host_messages import Refused
from roundhouse.environments.operations import Ask, fields_of
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.protocol import Completion
from roundhouse.plugins.nexrl.base import (
    BaseRolloutWorker,
    EvaluationRunResult,
    NoTrajectory,
    ReRollout,
    StepResult,
    WorkerFailed,
)
from roundhouse.plugins.programs.model_calls import LlmClient, RolloutLimit
from roundhouse.rollout.agents import RolloutAttempt
from roundhouse.rollout.hosted import HostedFunctions
from roundhouse.rollout.responses import Message
from roundhouse.trajectories.records import Rollout, Status, Turn
from roundhouse.user_code import describe_error

_NO_POLICY: Any = None
"""In place of the policy: `AskedLlm` asks the collector."""


@dataclass(frozen=True, slots=True)
class Played:
    """The trajectory that a worker put."""

    result: dict[str, Any]
    """Fields of the EvaluationRunResult."""
    loss_mask: list[bool]
    """One value for each model call."""
    limit: str
    """The limit that ended the run, or empty."""
    is_truncated: bool
    trained_on: bool
    logged: dict[str, float]
    """Metrics that the worker logged."""
    recorded: list[tuple[list[Message], list[dict[str, Any]], dict[str, Any]]] = field(default_factory=list)
    """Model calls of a trace, not yet known to the collector: messages, tools, fields of the Completion."""
    played_back: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None
    """Turns and items of a recording."""


async def play_worker(
    worker: BaseRolloutWorker,
    task: dict[str, Any],
    *,
    on_policy: bool,
    train: Sequence[dict[str, Any]],
    heldout: Sequence[dict[str, Any]],
) -> Played:
    """Play a task by a new worker.

    Raises:
        InfraError, DataError: the worker did not produce a trajectory.
    """
    worker.set_module_references(
        trajectory_pool=None,
        dataloader=train,
        weight_sync_controller=None,
        validate_dataloader=heldout,
        validator=None,
    )
    if on_policy:
        final = await _stepped(worker, task)
    else:
        worker.begin_validate()
        final = await _stepped(worker, task)
        worker.end_validate()
    name = type(worker).__name__
    if worker.put_back:
        final = StepResult.RE_ROLLOUT
    if final is None:
        raise NoTrajectory(f"{name} returned None: it failed before it had a trajectory.")
    if final not in list(StepResult):
        raise WorkerFailed(f"{name} returned {final!r}; the results are {', '.join(StepResult)} and None.")
    if final == StepResult.RE_ROLLOUT:
        raise ReRollout(f"{name} asks for the task again.")
    if final == StepResult.FAIL:
        raise WorkerFailed(f"{name} gave the task up.")
    if worker.result is None:
        raise WorkerFailed(f"{name} returned success, but put no trajectory.")
    return Played(
        fields_of(worker.result),
        _loss_mask(worker),
        worker.llm.limit,
        worker.is_truncated,
        worker.trained_on,
        worker.logged,
    )


async def _stepped(worker: BaseRolloutWorker, task: dict[str, Any]) -> str | None:
    try:
        return await worker.play(task)
    except RolloutLimit as limit:
        return await worker.cut_short(task, str(limit))
    except (InfraError, DataError, TimeoutError):
        raise
    except Exception as error:  # the worker's code ends here; its failure becomes an outcome
        raise WorkerFailed(f"{type(worker).__name__} raised {describe_error(error, task)}") from error


def _loss_mask(worker: BaseRolloutWorker) -> list[bool]:
    name, infos = type(worker).__name__, worker.llm.infos
    try:
        mask = worker.get_train_loss_mask(infos)
    except Exception as error:  # the worker's code ends here
        raise WorkerFailed(f"{name}.get_train_loss_mask raised {error!r}") from error
    if len(mask) != len(infos) or not all(isinstance(each, bool) for each in mask):
        raise WorkerFailed(
            f"{name}.get_train_loss_mask returned {mask!r} for {len(infos)} model calls; it must return one truth value a call."
        )
    return list(mask)


class AskedLlm(LlmClient):
    """The policy for a worker in another process than the collector."""

    def __init__(self, ask: Ask, facts: dict[str, Any]) -> None:
        """`facts`: as of `HostedWorkers.play`."""
        config = RolloutConfig.model_construct(max_tokens=facts["max_tokens"])
        rollout = Rollout("", 0, {}, "", Status.COMPLETED, seed=facts["seed"])
        sampling = Sampling.model_construct()
        super().__init__(RolloutAttempt(rollout, _NO_POLICY, config, sampling, policy_version=facts["policy_version"]))
        self._ask = ask
        self._recorded: list[tuple[list[Message], list[dict[str, Any]], dict[str, Any]]] = []
        self._played_back: tuple[list[dict[str, Any]], list[dict[str, Any]]] | None = None

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Completion:
        history, offered = [dict(message) for message in messages], list(tools)
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        try:
            completion = Completion(**await self._ask("complete", history, offered, sampling))
        except Refused as refused:
            if refused.name == RolloutLimit.__name__:
                raise RolloutLimit(str(refused)) from refused
            raise
        super().record(history, offered, completion)
        return completion

    def record(self, messages: list[Message], tools: list[dict[str, Any]], completion: Completion) -> None:
        super().record(messages, tools, completion)
        self._recorded.append((messages, tools, fields_of(completion)))

    def play_back(self, played: Rollout) -> None:
        super().play_back(played)
        self._played_back = [fields_of(turn) for turn in played.turns], list(played.items)

    def told(self, played: Played) -> dict[str, Any]:
        """Return the fields of an outcome, with the calls and turns that are new to the collector."""
        fields = fields_of(played) | {"recorded": self._recorded, "played_back": self._played_back}
        # Write values that are not JSON as text, for the caller of the rollout
        extra = orjson.dumps(played.result["extra_info"], default=repr, option=orjson.OPT_NON_STR_KEYS)
        return fields | {"result": played.result | {"extra_info": orjson.loads(extra)}}


def take_over(llm: LlmClient, played: Played) -> EvaluationRunResult:
    """Record the calls and turns that are new to the collector, and return the result."""
    for messages, tools, completion in played.recorded:
        llm.record(messages, tools, Completion(**completion))
    if played.played_back is not None:
        turns, items = played.played_back
        llm.play_back(Rollout("", 0, {}, "", Status.COMPLETED, turns=[Turn(**turn) for turn in turns], items=items))
    llm.limit = played.limit
    return EvaluationRunResult(**played.result)


class HostedWorkers:
    """Workers with user code, in a separate process."""

    def __init__(self, loader: str, config: Any, name: str) -> None:
        """`loader`, `config`: as of `HostedFunctions`; the process offers one function, `name`."""
        self._name = name
        self.functions = HostedFunctions(loader, config, name)

    async def play(self, llm: LlmClient, attempt: RolloutAttempt, task: dict[str, Any]) -> Played:
        """Call `play_worker` in the process, which asks `llm` for each model call.

        Raises:
            InfraError, DataError: see `play_worker`; or the process was lost.
        """
        facts = {
            "on_policy": attempt.on_policy,
            "seed": attempt.rollout.seed,
            "max_tokens": attempt.config.max_tokens,
            "policy_version": attempt.policy_version,
        }

        async def answer(_: str, messages: list[Message], tools: list[dict[str, Any]], asked: dict[str, Any]) -> Any:
            return fields_of(await llm.ask(messages, tools, **asked))

        played: Played = await self.functions.call(
            self._name, task, facts, result=Played, failure=WorkerFailed, answer=answer
        )
        return played
