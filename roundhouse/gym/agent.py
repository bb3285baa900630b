"""The agent loop: one attempt at one task, from its row to a rollout with a typed outcome.

Invariants: `run_rollout` returns a rollout whatever happens, cancellation apart; a failed rollout has no reward; whatever the
environment can say in text (a tool that raised, arguments that are not JSON, a tool that does not exist) is an observation
for the policy and the rollout goes on; whatever took the environment or the engine away is a failure with a kind.

    completed   the policy answered without a tool call, and the verifier judged it
    truncated   a limit of turns or tokens ended it, and the verifier judged what there was
    masked      the verifier judged it and said not to train on it
    failed      engine, environment, verifier or row failed; `failure_kind` tells whether a retry can help
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import orjson

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.protocol import Completion, ContextOverflow, PolicyClient
from roundhouse.gym.conversation import Conversation
from roundhouse.gym.environment import Verdict
from roundhouse.gym.failures import RolloutTimeout, ToolTimeout, classify
from roundhouse.gym.plan import RolloutSpec
from roundhouse.gym.responses import response_object
from roundhouse.gym.sessions import EnvironmentClient, EnvironmentSession
from roundhouse.gym.tools import ToolResult, invalid_arguments
from roundhouse.gym.verdicts import checked_verdict
from roundhouse.trajectories.records import Rollout, Status
from roundhouse.trajectories.tokens import derive_seed

log = logging.getLogger(__name__)
T = TypeVar("T")


async def run_rollout(
    spec: RolloutSpec,
    policy: PolicyClient,
    environment: EnvironmentClient,
    config: RolloutConfig,
    sampling: Sampling,
    attempt: int = 1,
) -> Rollout:
    """Make one attempt at `spec` within the limits of `config`."""
    rollout = Rollout(
        group_id=spec.group_id,
        sample=spec.sample,
        task=spec.row,
        environment=environment.name,
        status=Status.FAILED,
        attempt=attempt,
        seed=spec.seed,
        started_at=time.time(),
    )
    begun = time.perf_counter()
    await _attempt(rollout, policy, environment, config, sampling)
    rollout.seconds = time.perf_counter() - begun
    return rollout


async def _attempt(
    rollout: Rollout,
    policy: PolicyClient,
    environment: EnvironmentClient,
    config: RolloutConfig,
    sampling: Sampling,
) -> None:
    """Play the rollout to an outcome: its border, where every error becomes one."""
    try:
        async with asyncio.timeout(config.timeout_seconds) as limit:
            await _Episode(rollout, policy, environment, config, sampling).play()
    except TimeoutError as error:
        _fail(rollout, _timeout_of(error, limit, config))
    except (InfraError, DataError) as error:
        _fail(rollout, error)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        # Nobody cancelled us: the environment's or the engine client's own work was cancelled under its feet.
        _fail(rollout, RuntimeError(f"cancelled from within: {error!r}"))
    except Exception as error:  # a defect costs this rollout, not the others
        log.exception("Rollout %s ended with a defect", rollout.rollout_id)
        _fail(rollout, error)


def _timeout_of(error: TimeoutError, limit: asyncio.Timeout, config: RolloutConfig) -> Exception:
    if not limit.expired():
        return error
    return RolloutTimeout(
        f"Not finished after rollout.timeout_seconds={config.timeout_seconds:g}: the engine or the environment is too slow, "
        "or the limit too low."
    )


def _fail(rollout: Rollout, error: Exception) -> None:
    rollout.status = Status.FAILED
    rollout.reward, rollout.reward_components, rollout.finish_reason = None, {}, ""
    rollout.failure_kind, rollout.failure_code, rollout.failure_detail = classify(error)


class _Episode:
    """The working state of one attempt. What it learns goes into the rollout at once, so that a failure keeps it."""

    def __init__(
        self,
        rollout: Rollout,
        policy: PolicyClient,
        environment: EnvironmentClient,
        config: RolloutConfig,
        sampling: Sampling,
    ) -> None:
        self._rollout = rollout
        self._policy = policy
        self._environment = environment
        self._config = config
        self._sampling = sampling
        self._conversation = Conversation(rollout.task, f"msg_{rollout.seed:08x}")
        rollout.items, rollout.turns = self._conversation.items, self._conversation.turns
        self._metrics = {"agent_tool_calls": 0.0, "agent_tool_failures": 0.0, "agent_invalid_tool_calls": 0.0}
        rollout.metrics = self._metrics

    async def play(self) -> None:
        """From the session's beginning to the verdict."""
        rollout = self._rollout
        session = await self._in_environment(self._environment.seed_session(rollout.task))
        finish = await self._converse(session)
        response = self._response(finish)
        verdict = checked_verdict(await self._in_environment(session.verify(response)))
        self._judge(verdict, finish)

    async def _converse(self, session: EnvironmentSession) -> str:
        """Turns until something ends them; its name."""
        conversation, limit = self._conversation, self._config.max_tokens
        for turn in range(self._config.max_turns):
            room = limit - len(conversation.tokens)
            try:
                completion = await self._complete(turn, room)
            except ContextOverflow:
                if turn == 0:
                    raise
                return "max_tokens"
            calls = conversation.add_reply(completion)
            used = len(conversation.tokens)
            cut_short = completion.finish_reason == "length"
            if used > limit or (used == limit and (calls or cut_short)):
                return "max_tokens"
            if cut_short:
                return "max_tokens" if room < self._sampling.max_new_tokens else "length"
            if not calls:
                return "stop"
            for call in calls:
                await self._answer(session, call)
        return "max_turns"

    async def _complete(self, turn: int, room: int) -> Completion:
        sampling = self._sampling
        if room < sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        begun = time.perf_counter()
        try:
            return await self._policy.complete(
                self._conversation.messages,
                self._conversation.tools,
                sampling,
                derive_seed(self._rollout.seed, turn),
            )
        finally:
            self._rollout.generation_seconds += time.perf_counter() - begun

    async def _answer(self, session: EnvironmentSession, call: dict[str, Any]) -> None:
        """Run one tool call; its text joins the conversation."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self._metrics["agent_tool_calls"] += 1
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            result = invalid_arguments(error)
            self._metrics["agent_invalid_tool_calls"] += 1
        else:
            result = await self._call_tool(session, name, parsed)
            self._metrics["agent_tool_failures"] += not result.ok
        self._conversation.add_tool_output(call["id"], result.text)

    async def _call_tool(self, session: EnvironmentSession, name: str, arguments: Any) -> ToolResult:
        seconds = self._config.tool_timeout_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._in_environment(session.call_tool(name, arguments))
        except TimeoutError as error:
            if limit.expired():
                raise ToolTimeout(f"{name} did not return within rollout.tool_timeout_seconds={seconds:g}.") from error
            raise

    async def _in_environment(self, work: Awaitable[T]) -> T:
        begun = time.perf_counter()
        try:
            return await work
        finally:
            self._rollout.environment_seconds += time.perf_counter() - begun

    def _response(self, finish: str) -> dict[str, Any]:
        conversation = self._conversation
        return response_object(
            f"resp_{self._rollout.seed:08x}",
            conversation.output,
            model="policy",
            created_at=self._rollout.started_at,
            finish_reason="length" if finish in ("length", "max_tokens") else "stop",
            input_tokens=conversation.input_tokens,
            output_tokens=conversation.output_tokens,
            params=conversation.params,
        )

    def _judge(self, verdict: Verdict, finish: str) -> None:
        rollout = self._rollout
        rollout.reward = verdict.reward
        rollout.reward_components = verdict.reward_components
        rollout.metrics = self._metrics | verdict.metrics
        rollout.finish_reason = finish
        if verdict.mask:
            rollout.status = Status.MASKED
        else:
            rollout.status = Status.COMPLETED if finish == "stop" else Status.TRUNCATED
