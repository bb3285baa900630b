"""The agents that play environments of the two protocols: the tool loop and the Gymnasium loop.

Tool loop: the policy calls tools until it answers without a call, then the verifier judges. Whatever the environment can say in
text (a tool that raised, arguments that are not JSON, a tool that does not exist) is an observation for the policy and the
rollout continues; outputs stand in the order of the calls.

    completed   the policy answered without a tool call, and the verifier judged it
    truncated   a limit of turns or tokens ended it, and the verifier judged what there was
    masked      the verifier judged it and said not to train on it

Gymnasium loop: the world answers every reply with an observation and a reward, until it says that it is over. The rollout's
reward is the sum over the steps that were played; a reply that the world did not see has no part in it. Of a reply's tool calls
the world answers those it likes (`tool_outputs`), then its observation follows as a user message.

    completed   the world said `terminated`
    truncated   the world said `truncated` (finish `environment`), or a limit of turns or tokens ended it
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import orjson

from roundhouse.environments.base import Verdict
from roundhouse.environments.gymnasium import GymStep
from roundhouse.environments.tools import ToolResult, invalid_arguments
from roundhouse.rollout.attempt import RolloutAttempt
from roundhouse.rollout.conversation import Dialogue
from roundhouse.rollout.failures import ToolTimeout
from roundhouse.rollout.protocol import (
    BeginsEpisodes,
    EnvironmentSession,
    EpisodeSession,
    SeedsSessions,
    checked_verdict,
)
from roundhouse.trajectories.records import Status

NOT_RUN = ToolResult('{"error":"Not run: the task allows fewer tool calls (max_tool_calls)."}', 403)


class ToolLoop:
    """The agent of environments with tools and a verifier."""

    async def play(self, attempt: RolloutAttempt, environment: SeedsSessions) -> None:
        """From the session's beginning to the verdict."""
        episode = ToolEpisode(attempt)
        session = await attempt.in_environment(environment.seed_session(attempt.rollout.task))
        attempt.session = session
        if session.tools:
            episode.offer(session.tools)
        finish = await episode.converse(session)
        attempt.response = episode.response(finish)
        verdict = checked_verdict(await attempt.in_environment(session.verify(attempt.response)))
        attempt.answer = session.answer
        episode.judge(verdict, finish)


class ToolEpisode:
    """The working state of one attempt. `converse` alone is what an agent server's /v1/responses does."""

    def __init__(self, attempt: RolloutAttempt) -> None:
        self._attempt = attempt
        self._dialogue = Dialogue(attempt)
        self._metrics = {"agent_tool_calls": 0.0, "agent_tool_failures": 0.0, "agent_invalid_tool_calls": 0.0}
        attempt.rollout.metrics = self._metrics

    def offer(self, tools: Sequence[dict[str, Any]]) -> None:
        """Show the policy more tools than its row has."""
        self._dialogue.offer(tools)

    async def converse(self, session: EnvironmentSession) -> str:
        """Turns until something ends them; its name: stop, length, max_tokens or max_turns."""
        for _ in range(self._attempt.config.max_turns):
            reply = await self._dialogue.ask()
            if reply is None:
                return "max_tokens"
            if reply.limit:
                return reply.limit
            if not reply.calls:
                return "stop"
            await self._run_calls(session, reply.calls)
        return "max_turns"

    def response(self, finish: str) -> dict[str, Any]:
        """What the verifier judges."""
        return self._dialogue.response(finish)

    async def _run_calls(self, session: EnvironmentSession, calls: list[dict[str, Any]]) -> None:
        """Run one reply's calls; their texts join the conversation in the order of the calls."""
        terms = self._dialogue.terms
        allowed = len(calls)
        if terms.max_tool_calls is not None:
            allowed = min(allowed, terms.max_tool_calls - int(self._metrics["agent_tool_calls"]))
        together = (
            len(calls) > 1 and self._attempt.config.parallel_tool_calls and terms.together and not session.ordered
        )
        begun = time.perf_counter()
        try:
            if together:
                results = await _together([self._result(session, call) for call in calls[: max(allowed, 0)]])
            else:
                results = [await self._result(session, call) for call in calls[: max(allowed, 0)]]
        finally:
            self._attempt.rollout.environment_seconds += time.perf_counter() - begun
        results += [NOT_RUN] * (len(calls) - len(results))
        for call, result in zip(calls, results, strict=True):
            self._dialogue.conversation.add_tool_output(call["id"], result.text)

    async def _result(self, session: EnvironmentSession, call: dict[str, Any]) -> ToolResult:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self._metrics["agent_tool_calls"] += 1
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            self._metrics["agent_invalid_tool_calls"] += 1
            return invalid_arguments(error)
        result = await self._call_tool(session, name, parsed)
        self._metrics["agent_tool_failures"] += not result.ok
        return result

    async def _call_tool(self, session: EnvironmentSession, name: str, arguments: Any) -> ToolResult:
        seconds = self._attempt.config.tool_timeout_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                return await session.call_tool(name, arguments)
        except TimeoutError as error:
            if limit.expired():
                raise ToolTimeout(f"{name} did not return within rollout.tool_timeout_seconds={seconds:g}.") from error
            raise

    def judge(self, verdict: Verdict, finish: str) -> None:
        """Write the outcome down."""
        rollout = self._attempt.rollout
        rollout.reward = verdict.reward
        rollout.reward_components = verdict.reward_components
        rollout.metrics = self._metrics | verdict.metrics
        rollout.finish_reason = finish
        if verdict.mask:
            rollout.status = Status.MASKED
        else:
            rollout.status = Status.COMPLETED if finish == "stop" else Status.TRUNCATED


async def _together(work: Sequence[Coroutine[Any, Any, ToolResult]]) -> list[ToolResult]:
    """Results in order; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class GymnasiumLoop:
    """The agent of environments that speak the Gymnasium protocol."""

    async def play(self, attempt: RolloutAttempt, environment: BeginsEpisodes) -> None:
        """From /reset to the end of the episode."""
        dialogue = Dialogue(attempt)
        session, observation = await attempt.in_environment(environment.reset(attempt.rollout.task))
        attempt.session = session
        if observation:
            dialogue.conversation.add_observation(observation)
        rewards: list[float] = []
        finish, last = await _episode(attempt, dialogue, session, rewards)
        rollout = attempt.rollout
        rollout.reward = math.fsum(rewards)
        rollout.metrics = {"agent_steps": float(len(rewards)), **({} if last is None else last.metrics)}
        rollout.finish_reason = finish
        rollout.status = Status.COMPLETED if finish == "stop" else Status.TRUNCATED
        attempt.response = dialogue.response(finish)
        attempt.answer = _answer(attempt, last)


async def _episode(
    attempt: RolloutAttempt, dialogue: Dialogue, session: EpisodeSession, rewards: list[float]
) -> tuple[str, GymStep | None]:
    """Steps until something ends them: its name, and the last step."""
    step: GymStep | None = None
    for _ in range(attempt.config.max_turns):
        reply = await dialogue.ask()
        if reply is None:
            return "max_tokens", step
        step = await attempt.in_environment(session.step(dialogue.response_of(reply)))
        rewards.append(checked_verdict(Verdict(step.reward, metrics=step.metrics)).reward)
        if step.done:
            return "stop" if step.terminated else "environment", step
        if reply.limit == "max_tokens":
            return "max_tokens", step
        for call_id, text in step.tool_outputs.items():
            dialogue.conversation.add_tool_output(call_id, text)
        if step.observation:
            dialogue.conversation.add_observation(step.observation)
    return "max_turns", step


def _answer(attempt: RolloutAttempt, last: GymStep | None) -> dict[str, Any]:
    """What an agent server answers to /run."""
    return {
        **attempt.rollout.task,
        "response": attempt.response,
        "reward": attempt.rollout.reward,
        "terminated": attempt.rollout.finish_reason == "stop",
        "truncated": attempt.rollout.finish_reason != "stop",
        "info": {} if last is None else last.wire_info(),
    }
