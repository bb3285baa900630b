"""Attempt to play one task, from its row to a rollout with a typed outcome, and the two agent loops.

Invariants: `run_rollout` always returns a rollout unless it is cancelled. A failed rollout has no reward. An
environment or engine error becomes a failure with a kind. The session that the agent opened is always closed, within a
separate time limit, and an error during the close does not change the outcome. The agent writes each result into the
attempt at once, so a failure keeps it as evidence.

The environment client names its agent (`environment.agent`): the tool loop, the Gymnasium loop, or an agent server.
`play_rollout` also returns the reply that an agent server needs: the Responses object and the verifier's answer.

    played = await play_rollout(spec, policy, environment, config, sampling)
    played.rollout.status, played.response_with_tokens(), played.answer

Tool loop: the policy calls tools until it replies without a call and the environment has no follow-up, then the
verifier judges. Tool errors, invalid JSON
arguments and unknown tools are observations for the policy. Outputs keep the order of the calls. `rollout.cut_replies:
return` does the same for a reply that hit its token limit.

Gymnasium loop: the environment answers every reply with an observation and a reward until it ends the episode. The
rollout's reward is the sum over the played steps. `tool_outputs` may answer tool calls; the observation then follows as
a user message.

    completed   the verifier judged the final reply · the environment set `terminated`
    truncated   a limit of turns or tokens ended the rollout · the environment set `truncated` (finish `environment`)
    masked      the verifier excluded the rollout from training
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.environments.base import BadReward, GymStep, ToolResult, Verdict, invalid_arguments, read_arguments
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.protocol import TOKEN_FIELDS, PolicyClient, policy_of
from roundhouse.rollout.conversation import Dialogue
from roundhouse.rollout.plan import ROW_PROBLEM, RolloutSpec
from roundhouse.rollout.protocol import (
    Agent,
    BadTaskRow,
    BeginsEpisodes,
    EnvironmentClient,
    EnvironmentSession,
    EpisodeSession,
    RolloutSession,
    RolloutTimeout,
    SeedsSessions,
    StepFailed,
    ToolTimeout,
    VerifierFailed,
    as_verdict,
    at_limit,
    classify,
    results_together,
)
from roundhouse.rollout.replay import RecordedCalls, ReplayingEnvironment, ReplayingPolicy
from roundhouse.trajectories.records import Rollout, Status

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 30.0
"""Time limit for closing a session. Not part of the rollout's own limit: its outcome is decided by then."""
CUT = "Your last reply was cut off at its limit of tokens."
NOT_RUN = ToolResult('{"error":"Not run: the task allows fewer tool calls (max_tool_calls)."}', 403)


@dataclass(slots=True)
class RolloutAttempt:
    """The rollout in the making, the client of the policy, and the limits."""

    rollout: Rollout
    policy: PolicyClient
    config: RolloutConfig
    sampling: Sampling
    on_policy: bool = True
    """Whether the rollout is trained on: every token must be sampled exactly by `sampling`, and must be recorded."""
    policy_version: int | None = None
    """Version of the last refit, for agents that do not report a version."""
    judges_overflow: bool = False
    """A task that does not fit the model's context is an empty reply, which the verifier judges, as NeMo Gym has it. Otherwise
    it is a failure, without a reward."""
    engine: PolicyClient | None = None
    """Client for calls outside the rollout, such as a judge's. Never a recording."""
    session: RolloutSession | None = None
    """Set by the agent as soon as it has one."""
    response: dict[str, Any] | None = None
    """The Responses object that the verifier judged, without token fields."""
    call_ends: list[int] = field(default_factory=list)
    """For each model call, the index in `response.output` of its last item."""
    answer: dict[str, Any] | None = None
    """The environment's complete reply to /verify, or its equivalent."""

    async def in_environment(self, work: Awaitable[T]) -> T:
        """Await the environment, on its account."""
        start = time.perf_counter()
        try:
            with ACTIVITY.track("environment", "call", where=self.rollout.environment):
                return await work
        finally:
            self.rollout.environment_seconds += time.perf_counter() - start

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
    """Attempt `spec` within the limits of `config` and return the attempt with all that the agent recorded.

    Args:
        on_policy, policy_version, judges_overflow: see `RolloutAttempt`.
        recorded: finished calls of an earlier attempt, to be replayed; new calls are added. If the rollout diverges
            from the recording, it is played again from its first call.
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
        client: PolicyClient = own if calls is None else ReplayingPolicy(calls, rollout, own)
        world = environment if calls is None or not calls.replays else ReplayingEnvironment(calls, environment)
        played = RolloutAttempt(rollout, client, config, sampling, on_policy, policy_version, judges_overflow, policy)
        start = time.perf_counter()
        try:
            await _play(environment.agent, played, world)
        finally:
            rollout.seconds = time.perf_counter() - start
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
    """Play the rollout as `play_rollout` does and return only the rollout."""
    return (await play_rollout(*arguments, **options)).rollout


async def _play(agent: Agent, attempt: RolloutAttempt, environment: object) -> None:
    """Play to an outcome: here every error becomes one."""
    rollout, config = attempt.rollout, attempt.config
    try:
        if (problem := rollout.task.get(ROW_PROBLEM)) is not None:
            raise BadTaskRow(str(problem))
        async with asyncio.timeout(config.timeout_seconds) as limit:
            await agent.play(attempt, environment)
        refuse_large_rewards(rollout, config.reward_limit)
    except TimeoutError as error:
        if limit.expired():
            text = (
                f"Not finished after rollout.timeout_seconds={config.timeout_seconds:g}: the engine or the environment is too "
                "slow, or the limit too low."
            )
            _fail(rollout, at_limit(error, RolloutTimeout(text)))
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
    """Working state of one attempt. An agent server's /v1/responses uses `converse` alone."""

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
            if reply.limit == "length" and self._attempt.config.cut_replies == "return":
                self._dialogue.conversation.add_observation(CUT)
                self._metrics["agent_cut_replies"] = self._metrics.get("agent_cut_replies", 0.0) + 1
                continue
            if reply.limit:
                return reply.limit
            if not reply.calls:
                follow_up = session.follow_up(self._dialogue.response_of(reply))
                if not (message := _text("The follow-up", await self._attempt.in_environment(follow_up))):
                    return "stop"
                self._dialogue.conversation.add_observation(message)
                continue
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
            start = time.perf_counter()
            try:
                if together:
                    allowed_calls = reply.calls[: max(allowed, 0)]
                    results = await results_together(self._result(session, call) for call in allowed_calls)
                else:
                    results = [await self._result(session, call) for call in reply.calls[: max(allowed, 0)]]
            finally:
                self._attempt.rollout.environment_seconds += time.perf_counter() - start
            results += [NOT_RUN] * (len(reply.calls) - len(results))
            for call, result in zip(reply.calls, results, strict=True):
                self._dialogue.conversation.add_tool_output(call["id"], result.text)
            if rewards := [_finite("a tool's reward", each.reward) for each in results if each.reward is not None]:
                self._attempt.rollout.turns[-1].reward = _total("the turn's reward", rewards)
        return "max_turns"

    def response(self, finish: str) -> dict[str, Any]:
        """Return the Responses object that the verifier judges."""
        return self._dialogue.response(finish)

    async def _result(self, session: EnvironmentSession, call: dict[str, Any]) -> ToolResult:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self._metrics["agent_tool_calls"] += 1
        try:
            parsed = read_arguments(arguments)
        except ValueError as error:
            self._metrics["agent_invalid_tool_calls"] += 1
            return invalid_arguments(arguments, error)
        seconds = self._attempt.config.tool_timeout_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                result = await session.call_tool(name, parsed)
        except TimeoutError as error:
            if limit.expired():
                text = f"{name} did not return within rollout.tool_timeout_seconds={seconds:g}."
                raise at_limit(error, ToolTimeout(text)) from error
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
        if observation := _text("The observation of reset", observation):
            dialogue.conversation.add_observation(observation)
        rewards: list[float] = []
        finish, last = await _episode(attempt, dialogue, session, rewards)
        rollout = attempt.rollout
        rollout.reward = _total("reward", rewards)
        rollout.metrics = {
            "agent_steps": float(len(rewards)),
            **({} if last is None else reported_metrics(last.metrics)),
        }
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
        rewards.append(checked_verdict(Verdict(step.reward)).reward)
        outputs, observation = _shown(step)
        attempt.rollout.turns[-1].reward = rewards[-1]
        if step.done:
            return "stop" if step.terminated else "environment", step
        if reply.limit == "max_tokens":
            return "max_tokens", step
        for call_id, text in outputs.items():
            dialogue.conversation.add_tool_output(call_id, text)
        if observation:
            dialogue.conversation.add_observation(observation)
    return "max_turns", step


def _shown(step: GymStep) -> tuple[Mapping[str, str], str]:
    """Return the tool outputs by call id, and the observation, of a step.

    Raises:
        StepFailed: a field of the step has another type than `GymStep` declares.
    """
    for name in ("tool_outputs", "info", "metrics"):
        if not isinstance(value := getattr(step, name), Mapping):
            raise StepFailed(f"{name} of a step is a {type(value).__name__}; it must be a mapping.")
    outputs = {str(call_id): _text(f"tool_outputs[{call_id!r}]", text) for call_id, text in step.tool_outputs.items()}
    return outputs, _text("The observation of a step", step.observation)


def _text(name: str, value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise StepFailed(
            f"{name} is a {type(value).__name__}; it must be a text. Write it as text, such as json.dumps."
        )
    return value or ""


RELATIVE_TOLERANCE = 1e-5
"""Tolerance between the sum of components and the reward, as in NeMo RL."""
MOST_NAMES = 1000
"""Metrics, or components, of one verdict: each name is a column of every report and a curve of the tracker."""
LONGEST_NAME = 200
METRICS_LEFT_OUT = "metrics_left_out"


def checked_verdict(verdict: object) -> Verdict:
    """Return the verdict with all its numbers as finite floats, its components adding up to its reward. A reward that is not a
    number fails the rollout; it never becomes a zero. A metric that is not a number is left out and counted: the reward stands.

    Raises:
        VerifierFailed: the verifier returned neither a verdict nor a number.
        BadReward: the reward or a component is not a finite number, a component's name is not usable, or the components do
            not add up.
    """
    verdict = as_verdict(verdict)
    if isinstance(verdict.reward, bool):
        raise BadReward(f"reward is {verdict.reward}, a truth value; the verifier must return a number such as 1.0.")
    reward = _finite("reward", verdict.reward)
    components = _checked_components(verdict.reward_components)
    total = _total("the sum of reward_components", components.values())
    if components and not math.isclose(total, reward, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-8):
        raise BadReward(f"reward is {reward}, but its components {components} add up to {total}.")
    return Verdict(reward, components, reported_metrics(verdict.metrics), _truth_value(verdict.mask))


def _truth_value(mask: object) -> bool:
    """Return whether a rollout is masked. Reject a text such as "false"."""
    if mask not in (None, True, False):
        raise VerifierFailed(
            f"mask_sample is {mask!r}, a {type(mask).__name__}; the verifier must return true or false."
        )
    return bool(mask)


def reported_metrics(metrics: object) -> dict[str, float]:
    """Return the metrics that can be reported, at most `MOST_NAMES`, in their order; `metrics_left_out` counts the others.

    A name has up to `LONGEST_NAME` printable characters; a value is a finite number.
    """
    if not isinstance(metrics, Mapping):
        return {METRICS_LEFT_OUT: 1.0}
    reported: dict[str, float] = {}
    for name, value in metrics.items():
        if len(reported) == MOST_NAMES:
            break
        number = value if isinstance(value, Real) else math.nan
        with suppress(OverflowError):
            if _is_name(name) and math.isfinite(number):
                reported[str(name)] = float(number)
    left_out = len(metrics) - len(reported)
    return reported | ({METRICS_LEFT_OUT: float(left_out)} if left_out else {})


def refuse_large_rewards(rollout: Rollout, limit: float) -> None:
    """
    Raises:
        BadReward: the reward, a component or the reward of a turn is larger than `limit` in size. One such rollout would
            decide every mean that it is part of.
    """
    numbers = {f"reward_components[{name!r}]": value for name, value in rollout.reward_components.items()}
    numbers |= {f"the reward of turn {turn.turn}": turn.reward for turn in rollout.turns if turn.reward is not None}
    if rollout.reward is not None:
        numbers["reward"] = rollout.reward
    for name, value in numbers.items():
        if abs(value) > limit:
            raise BadReward(
                f"{name} is {value:g}, more than rollout.reward_limit={limit:g} in size. Correct the verifier, or raise the "
                "limit."
            )


def _checked_components(components: object) -> dict[str, float]:
    if not isinstance(components, Mapping):
        raise BadReward(
            f"reward_components is a {type(components).__name__}; the verifier must return numbers by name."
        )
    if len(components) > MOST_NAMES:
        raise BadReward(f"The verdict has {len(components)} reward_components; {MOST_NAMES} are allowed.")
    for name in components:
        if not _is_name(name):
            raise BadReward(
                f"The name {str(name)[:LONGEST_NAME]!r} in reward_components must have 1 to {LONGEST_NAME} printable "
                "characters."
            )
    return {str(name): _finite(f"reward_components[{name!r}]", number) for name, number in components.items()}


def _is_name(name: object) -> bool:
    return 0 < len(str(name)) <= LONGEST_NAME and str(name).isprintable()


def _finite(name: str, number: Any) -> float:
    if not isinstance(number, Real):
        raise BadReward(f"{name} is {number!r}, a {type(number).__name__}; the verifier must return a number.")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise BadReward(f"{name} is {value}; the verifier must return a finite number.")
    return value


def _total(name: str, numbers: Iterable[float]) -> float:
    try:
        return math.fsum(numbers)
    except OverflowError as error:
        raise BadReward(f"{name} is not finite: its parts are too large to add up.") from error


def rollout_name(group_id: str, sample: int) -> str:
    """A unique name that can be part of a path: letters, digits, dots, dashes, underscores, a letter first."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", group_id)[:64]
    return f"r-{readable}-{sample}-{uuid.uuid4().hex[:12]}"
