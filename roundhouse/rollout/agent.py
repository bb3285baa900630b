"""The border of a rollout: one attempt at one task, from its row to a rollout with a typed outcome.

Invariants: `run_rollout` returns a rollout whatever happens, cancellation apart; a failed rollout has no reward; whatever took
the environment or the engine away is a failure with a kind; the session that the agent opened is closed however the rollout
ended, within a time limit of its own, and how that went changes nothing about the outcome.

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
from typing import Any, ParamSpec

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.protocol import PolicyClient
from roundhouse.rollout.attempt import Attempt
from roundhouse.rollout.failures import RolloutTimeout, classify
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import Agent, EnvironmentClient, Session
from roundhouse.rollout.replay import Tape
from roundhouse.trajectories.records import Rollout, Status

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
    tape: Tape | None = None,
) -> Attempt:
    """Make one attempt at `spec` within the limits of `config`; everything that the agent left.

    Args:
        on_policy, policy_version, judges_overflow: see `Attempt`.
        tape: what an earlier attempt finished, and where this one's calls are recorded. Where the rollout goes another way
            than its tape, it is played once more without.
    """

    async def play(tape: Tape) -> Attempt:
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
        asked = tape.of(rollout, policy)
        return await _played(
            environment.agent,
            Attempt(rollout, asked, config, sampling, on_policy, policy_version, judges_overflow, tape),
        )

    tape = tape or Tape()
    played = await play(tape)
    if (divergence := tape.divergence(played.rollout)) is None:
        return played
    log.warning("Rollout %s starts afresh (%s): %s", spec.rollout_id, divergence.reason, divergence.detail)
    return await play(tape.blank(spec.rollout_id, divergence))


def _without_the_rest(play: Callable[P, Awaitable[Attempt]]) -> Callable[P, Coroutine[Any, Any, Rollout]]:
    async def run(*arguments: P.args, **options: P.kwargs) -> Rollout:
        return (await play(*arguments, **options)).rollout

    return run


run_rollout = _without_the_rest(play_rollout)
"""As `play_rollout`; the rollout alone."""


async def _played(agent: Agent, attempt: Attempt) -> Attempt:
    """Play, take the time, close the session."""
    rollout = attempt.rollout
    begun = time.perf_counter()
    try:
        await _play(agent, attempt)
    finally:
        rollout.seconds = time.perf_counter() - begun
        if attempt.session is not None and attempt.session.needs_close:
            await _close(attempt.session, rollout)
    return attempt


async def _play(agent: Agent, attempt: Attempt) -> None:
    """Play to an outcome: the border where every error becomes one."""
    rollout, config = attempt.rollout, attempt.config
    try:
        async with asyncio.timeout(config.timeout_seconds) as limit:
            await agent.play(attempt)
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


async def _close(session: Session, rollout: Rollout) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await session.close()
    except Exception as error:  # noqa: BLE001 - the outcome stands; a session that cannot be closed expires by itself
        log.warning("The session of rollout %s could not be closed: %r", rollout.rollout_id, error)


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
