"""One attempt at one task, from its row to a rollout with a typed outcome, and the two agent loops that play it.

Invariants: `run_rollout` returns a rollout whatever happens, cancellation apart; a failed rollout has no reward; whatever took
the environment or the engine away is a failure with a kind; the session that the agent opened is closed however the rollout
ended, within a time limit of its own, and how that ended changes nothing about the outcome. What an agent learns is written
into the attempt at once, so that a failure keeps it as evidence.

The environment client names the agent that plays (`environment.agent`): the tool loop, the Gymnasium loop, or an agent server.
`play_rollout` also gives what an agent server answers with: the Responses object and the verifier's answer.

    played = await play_rollout(spec, policy, environment, config, sampling)
    played.rollout.status, played.response_with_tokens(), played.answer

Tool loop: the policy calls tools until it answers without a call, then the verifier judges. Whatever the environment can say in
text (a tool that raised, arguments that are not JSON, a tool that does not exist) is an observation for the policy and the
rollout continues; outputs are in the order of the calls.

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
import logging
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

import orjson

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.environments.base import GymStep, ToolResult, Verdict, invalid_arguments
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.protocol import TOKEN_FIELDS, PolicyClient, policy_of
from roundhouse.rollout.conversation import Dialogue
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import (
    Agent,
    BadReward,
    BeginsEpisodes,
    EnvironmentClient,
    EnvironmentSession,
    EpisodeSession,
    RolloutSession,
    RolloutTimeout,
    SeedsSessions,
    ToolTimeout,
    VerifierFailed,
    classify,
)
from roundhouse.rollout.replay import RecordedCalls, ReplayingEnvironment, ReplayingPolicy
from roundhouse.trajectories.records import Rollout, Status

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 30.0
"""Time limit for closing a session. Not part of the rollout's own limit: its outcome is decided by then."""
NOT_RUN = ToolResult('{"error":"Not run: the task allows fewer tool calls (max_tool_calls)."}', 403)


@dataclass(slots=True)
class RolloutAttempt:
    """The rollout in the making, the client of the policy, and the limits."""

    rollout: Rollout
    policy: PolicyClient
    config: RolloutConfig
    sampling: Sampling
    on_policy: bool = True
    """The rollout is to be trained on: every token must be drawn as `sampling` says and be known."""
    policy_version: int | None = None
    """Version that the engine was refitted to, for agents whose answers do not have it."""
    judges_overflow: bool = False
    """A task that does not fit the model's context is an empty reply, which the verifier judges, as NeMo Gym has it. Otherwise
    it is a failure, without a reward."""
    engine: PolicyClient | None = None
    """Where calls go that are no part of the rollout, such as a judge's: never a recording."""
    session: RolloutSession | None = None
    """Set by the agent as soon as it has one."""
    response: dict[str, Any] | None = None
    """The Responses object that the verifier judged, without token fields."""
    call_ends: list[int] = field(default_factory=list)
    """For each model call, the index in `response.output` of its last item."""
    answer: dict[str, Any] | None = None
    """The environment's whole answer to /verify, or what it would be."""

    async def in_environment(self, work: Awaitable[T]) -> T:
        """Await the environment, on its account."""
        begun = time.perf_counter()
        try:
            with ACTIVITY.track("environment", "call", where=self.rollout.environment):
                return await work
        finally:
            self.rollout.environment_seconds += time.perf_counter() - begun

    @property
    def token_marks(self) -> list[tuple[int, dict[str, Any]]]:
        """For each model call: the index in `response.output` of its last item, and its token fields (whole prompts)."""
        marks: list[tuple[int, dict[str, Any]]] = []
        whole: list[list[int]] = []
        for index, turn in zip(self.call_ends, self.rollout.turns, strict=False):
            prompt = ([] if turn.parent is None else whole[turn.parent]) + turn.prompt_token_ids
            whole.append(prompt + turn.generation_token_ids)
            if not turn.generation_token_ids:
                continue  # the engine returned no token IDs
            fields = (prompt, turn.generation_token_ids, turn.generation_log_probs)
            marks.append((index, dict(zip(TOKEN_FIELDS, fields, strict=True))))
        return marks

    def response_with_tokens(self) -> dict[str, Any] | None:
        """The Responses object with the three token fields on the last item of each model call, as agents pass it on."""
        if self.response is None:
            return None
        output = list(self.response["output"])
        for index, fields in self.token_marks:
            output[index] = {**output[index], **fields}
        return {**self.response, "output": output}


async def play_rollout(
    spec: RolloutSpec,
    policy: PolicyClient,
    environment: EnvironmentClient,
    config: RolloutConfig,
    sampling: Sampling,
    attempt: int = 1,
    *,
    on_policy: bool = True,
    policy_version: int | None = None,
    judges_overflow: bool = False,
    recorded: RecordedCalls | None = None,
) -> RolloutAttempt:
    """Make one attempt at `spec` within the limits of `config`; everything that the agent left.

    Args:
        on_policy, policy_version, judges_overflow: see `RolloutAttempt`.
        recorded: the calls that an earlier attempt finished, which are replayed; new ones are recorded there. Where the
            rollout takes another course than its recording, it is played once more from its first call.
    """

    own = policy_of(spec.rollout_id, policy)

    async def play(calls: RecordedCalls | None) -> RolloutAttempt:
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
        asked: PolicyClient = own if calls is None else ReplayingPolicy(calls, rollout, own)
        world = environment if calls is None or not calls.replays else ReplayingEnvironment(calls, environment)
        played = RolloutAttempt(rollout, asked, config, sampling, on_policy, policy_version, judges_overflow, policy)
        begun = time.perf_counter()
        try:
            await _play(environment.agent, played, world)
        finally:
            rollout.seconds = time.perf_counter() - begun
            if played.session is not None and played.session.needs_close:
                try:
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await played.session.close()
                except Exception as error:  # noqa: BLE001 - the outcome stands; a session that cannot be closed expires by itself
                    log.warning("The session of rollout %s could not be closed: %r", rollout.rollout_id, error)
        return played

    played = await play(recorded)
    if recorded is None or (divergence := recorded.divergence(played.rollout)) is None:
        return played
    log.warning("Rollout %s starts afresh (%s): %s", spec.rollout_id, divergence.reason, divergence.detail)
    return await play(recorded.restarted(spec.rollout_id, divergence))


async def run_rollout(*arguments: Any, **options: Any) -> Rollout:
    """As `play_rollout`; the rollout alone."""
    return (await play_rollout(*arguments, **options)).rollout


async def _play(agent: Agent, attempt: RolloutAttempt, environment: object) -> None:
    """Play to an outcome: here every error becomes one."""
    rollout, config = attempt.rollout, attempt.config
    try:
        async with asyncio.timeout(config.timeout_seconds) as limit:
            await agent.play(attempt, environment)
    except TimeoutError as error:
        if limit.expired():
            text = (
                f"Not finished after rollout.timeout_seconds={config.timeout_seconds:g}: the engine or the environment is too "
                "slow, or the limit too low."
            )
            _fail(rollout, RolloutTimeout(text))
        else:
            _fail(rollout, error)
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


def _fail(rollout: Rollout, error: Exception) -> None:
    rollout.status = Status.FAILED
    rollout.reward, rollout.reward_components, rollout.finish_reason = None, {}, ""
    rollout.failure_kind, rollout.failure_code, rollout.failure_detail = classify(error)


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
            terms = self._dialogue.terms
            allowed = len(reply.calls)
            if terms.max_tool_calls is not None:
                allowed = min(allowed, terms.max_tool_calls - int(self._metrics["agent_tool_calls"]))
            together = (
                len(reply.calls) > 1
                and self._attempt.config.parallel_tool_calls
                and terms.together
                and not session.ordered
            )
            begun = time.perf_counter()
            try:
                if together:
                    # Results in order; the first failure ends the others
                    work = [self._result(session, call) for call in reply.calls[: max(allowed, 0)]]
                    try:
                        async with asyncio.TaskGroup() as group:
                            tasks = [group.create_task(each) for each in work]
                    except BaseExceptionGroup as errors:
                        raise errors.exceptions[0] from None
                    results = [task.result() for task in tasks]
                else:
                    results = [await self._result(session, call) for call in reply.calls[: max(allowed, 0)]]
            finally:
                self._attempt.rollout.environment_seconds += time.perf_counter() - begun
            results += [NOT_RUN] * (len(reply.calls) - len(results))
            for call, result in zip(reply.calls, results, strict=True):
                self._dialogue.conversation.add_tool_output(call["id"], result.text)
            if given := [_finite("a tool's reward", each.reward) for each in results if each.reward is not None]:
                self._attempt.rollout.turns[-1].reward = math.fsum(given)
        return "max_turns"

    def response(self, finish: str) -> dict[str, Any]:
        """What the verifier judges."""
        return self._dialogue.response(finish)

    async def _result(self, session: EnvironmentSession, call: dict[str, Any]) -> ToolResult:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self._metrics["agent_tool_calls"] += 1
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            self._metrics["agent_invalid_tool_calls"] += 1
            return invalid_arguments(error)
        seconds = self._attempt.config.tool_timeout_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                result = await session.call_tool(name, parsed)
        except TimeoutError as error:
            if limit.expired():
                raise ToolTimeout(f"{name} did not return within rollout.tool_timeout_seconds={seconds:g}.") from error
            raise
        self._metrics["agent_tool_failures"] += not result.ok
        return result

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
        attempt.answer = {
            **rollout.task,
            "response": attempt.response,
            "reward": rollout.reward,
            "terminated": finish == "stop",
            "truncated": finish != "stop",
            "info": {} if last is None else last.wire_info(),
        }


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
        attempt.rollout.turns[-1].reward = rewards[-1]
        if step.done:
            return "stop" if step.terminated else "environment", step
        if reply.limit == "max_tokens":
            return "max_tokens", step
        for call_id, text in step.tool_outputs.items():
            dialogue.conversation.add_tool_output(call_id, text)
        if step.observation:
            dialogue.conversation.add_observation(step.observation)
    return "max_turns", step


RELATIVE_TOLERANCE = 1e-5
"""Of the sum of components against the reward, as NeMo RL has it."""


def checked_verdict(verdict: object) -> Verdict:
    """The verdict with all its numbers as finite floats, its components adding up to its reward. What is none fails the
    rollout; it never becomes a zero.

    Raises:
        VerifierFailed: the verifier returned something else than a verdict.
        BadReward: reward, a component or a metric is no finite number, or the components do not add up.
    """
    if not isinstance(verdict, Verdict):
        raise VerifierFailed(f"verify returned a {type(verdict).__name__}; it must return a Verdict.")
    if isinstance(verdict.reward, bool):
        raise BadReward(f"reward is {verdict.reward}, a truth value; the verifier must return a number such as 1.0.")
    reward = _finite("reward", verdict.reward)
    components = _finite_all("reward_components", verdict.reward_components)
    total = math.fsum(components.values())
    if components and not math.isclose(total, reward, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-8):
        raise BadReward(f"reward is {reward}, but its components {components} add up to {total}.")
    return Verdict(reward, components, _finite_all("metrics", verdict.metrics), bool(verdict.mask))


def _finite_all(name: str, numbers: Mapping[str, Any]) -> dict[str, float]:
    return {str(key): _finite(f"{name}[{key!r}]", number) for key, number in numbers.items()}


def _finite(name: str, number: Any) -> float:
    if not isinstance(number, Real):
        raise BadReward(f"{name} is {number!r}, a {type(number).__name__}; the verifier must return a number.")
    value = float(number)
    if not math.isfinite(value):
        raise BadReward(f"{name} is {value}; the verifier must return a finite number.")
    return value
