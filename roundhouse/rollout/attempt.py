"""One attempt at one task, from its row to a rollout with a typed outcome.

Invariants: `run_rollout` returns a rollout whatever happens, cancellation apart; a failed rollout has no reward; whatever took
the environment or the engine away is a failure with a kind; the session that the agent opened is closed however the rollout
ended, within a time limit of its own, and how that ended changes nothing about the outcome. What an agent learns is written
into the attempt at once, so that a failure keeps it as evidence.

The environment client says which agent plays (`environment.agent`): the tool loop, the Gymnasium loop, or an agent server.
`play_rollout` also gives what an agent server answers with: the Responses object and the verifier's answer.

    played = await play_rollout(spec, policy, environment, config, sampling)
    played.rollout.status, played.response_with_tokens(), played.answer
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from roundhouse.activity import ACTIVITY
from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.protocol import TOKEN_FIELDS, PolicyClient
from roundhouse.rollout.failures import RolloutTimeout, classify
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import Agent, EnvironmentClient, RolloutSession
from roundhouse.rollout.replay import RecordedCalls, ReplayingEnvironment, ReplayingPolicy
from roundhouse.trajectories.records import Rollout, Status

T = TypeVar("T")


@dataclass(slots=True)
class RolloutAttempt:
    """The rollout in the making, who answers for the policy, and the limits."""

    rollout: Rollout
    policy: PolicyClient
    config: RolloutConfig
    sampling: Sampling
    on_policy: bool = True
    """The rollout is to be trained on: every token must be drawn as `sampling` says and be known."""
    policy_version: int | None = None
    """Version that the engine was refitted to, for agents whose answers do not tell it."""
    judges_overflow: bool = False
    """A task that does not fit the model's context is an empty reply, which the verifier judges, as NeMo Gym has it. Otherwise
    it is a failure, without a reward."""
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
                continue  # an engine that tells no tokens
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


log = logging.getLogger(__name__)

P = ParamSpec("P")

CLOSE_SECONDS = 30.0
"""Time limit for closing a session. Not part of the rollout's own limit: its outcome is decided by then."""


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
        asked: PolicyClient = policy if calls is None else ReplayingPolicy(calls, rollout, policy)
        world = environment if calls is None or not calls.replays else ReplayingEnvironment(calls, environment)
        played = RolloutAttempt(rollout, asked, config, sampling, on_policy, policy_version, judges_overflow)
        begun = time.perf_counter()
        try:
            await _play(environment.agent, played, world)
        finally:
            rollout.seconds = time.perf_counter() - begun
            if played.session is not None and played.session.needs_close:
                await _close(played.session, rollout)
        return played

    played = await play(recorded)
    if recorded is None or (divergence := recorded.divergence(played.rollout)) is None:
        return played
    log.warning("Rollout %s starts afresh (%s): %s", spec.rollout_id, divergence.reason, divergence.detail)
    return await play(recorded.restarted(spec.rollout_id, divergence))


def _without_the_rest(play: Callable[P, Awaitable[RolloutAttempt]]) -> Callable[P, Coroutine[Any, Any, Rollout]]:
    async def run(*arguments: P.args, **options: P.kwargs) -> Rollout:
        return (await play(*arguments, **options)).rollout

    return run


run_rollout = _without_the_rest(play_rollout)
"""As `play_rollout`; the rollout alone."""


async def _play(agent: Agent, attempt: RolloutAttempt, environment: object) -> None:
    """Play to an outcome: the border where every error becomes one."""
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


async def _close(session: RolloutSession, rollout: Rollout) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await session.close()
    except Exception as error:  # noqa: BLE001 - the outcome stands; a session that cannot be closed expires by itself
        log.warning("The session of rollout %s could not be closed: %r", rollout.rollout_id, error)


def _fail(rollout: Rollout, error: Exception) -> None:
    rollout.status = Status.FAILED
    rollout.reward, rollout.reward_components, rollout.finish_reason = None, {}, ""
    rollout.failure_kind, rollout.failure_code, rollout.failure_detail = classify(error)
