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

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.errors import DataError, InfraError
from roundhouse.generation.protocol import PolicyClient
from roundhouse.gym.agents.attempt import Attempt
from roundhouse.gym.failures import RolloutTimeout, classify
from roundhouse.gym.plan import RolloutSpec
from roundhouse.gym.protocol import Agent, EnvironmentClient, Session
from roundhouse.trajectories.records import Rollout, Status

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""Time limit for closing a session. Not part of the rollout's own limit: its outcome is decided by then."""


async def run_rollout(
    spec: RolloutSpec,
    policy: PolicyClient,
    environment: EnvironmentClient,
    config: RolloutConfig,
    sampling: Sampling,
    attempt: int = 1,
    *,
    on_policy: bool = True,
    policy_version: int | None = None,
) -> Rollout:
    """Make one attempt at `spec` within the limits of `config`; see `Attempt` for the last two."""
    played = await play_rollout(
        spec, policy, environment, config, sampling, attempt, on_policy=on_policy, policy_version=policy_version
    )
    return played.rollout


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
) -> Attempt:
    """As `run_rollout`, with everything that the agent left."""
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
    played = Attempt(rollout, policy, config, sampling, on_policy, policy_version)
    begun = time.perf_counter()
    try:
        await _play(environment.agent, played)
    finally:
        rollout.seconds = time.perf_counter() - begun
        if played.session is not None and played.session.needs_close:
            await _close(played.session, rollout)
    return played


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
