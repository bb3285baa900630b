"""The ways a rollout fails, each a type: its base class says whether a retry can help, its name is the failure code.

Invariant: an error that is none of ours when it reaches a rollout's border, and that the taxonomy does not know either, is a
defect and gets the code `unexpected_error`; it is not retried.

    EnvironmentTimeout(InfraError)  ->  (FailureKind.INFRA, "environment_timeout", text)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundhouse.errors import DataError, InfraError, RoundhouseError
from roundhouse.health.taxonomy import Kind, code_of, kind_of, typed
from roundhouse.trajectories.records import FailureKind

FAILURE_HEADER = "X-Roundhouse-Failure"
"""Our servers set it to `infra` where the environment says that its infrastructure failed. Foreign servers never do."""
FAILURE, TERMINAL, DETAIL = "_ng_failure_class", "_ng_failure_terminal", "_ng_failure_detail"
"""Fields of a row that failed: the code, whether another attempt cannot help, the reason in words."""
SESSION_HEADER = "X-Roundhouse-Session"
SESSION_LAST_USE = "last-use"
"""In a request: the session will not be used again."""
SESSION_CLOSED = "closed"
"""In the answer: it was closed."""


class EnvironmentUnreachable(InfraError):
    """The resources server does not accept connections, or broke one."""


class EnvironmentTimeout(InfraError):
    """The resources server did not answer within its time limit."""


class EnvironmentUnavailable(InfraError):
    """The resources server answered that it cannot serve now: overloaded, restarted, or something behind it is down."""


class ToolTimeout(InfraError):
    """A tool call exceeded `rollout.tool_timeout_seconds`."""


class RolloutTimeout(InfraError):
    """A rollout exceeded `rollout.timeout_seconds`."""


class JudgeFailed(InfraError):
    """The verifier's judge could not be asked; it may answer another time."""


class BadTaskRow(DataError):
    """The task row does not have the shape that `responses_create_params` must have."""


class SeedFailed(DataError):
    """The environment could not begin a session for the row."""


class SnapshotFailed(DataError):
    """The environment could not write its session down, or not restore it."""


class VerifierFailed(DataError):
    """The verifier raised, or its answer is no verdict."""


class StepFailed(DataError):
    """The environment could not play a step, or its answer is none."""


class AgentUnavailable(InfraError):
    """The agent server answered that it cannot serve now."""


class AgentFailed(InfraError):
    """The agent reports that the rollout failed; it may succeed another time."""


class AgentGaveUp(DataError):
    """The agent reports a failure that will not pass, or refuses the row."""


class BadAgentAnswer(DataError):
    """What the agent answered is no rollout."""


class NoTrainableTokens(DataError):
    """A rollout for training came without token IDs."""


class UnknownAgent(DataError):
    """The head server knows no such agent."""


class BadReward(DataError):
    """The verdict's reward (or one of its numbers) is not a finite number."""


class BadCompletion(DataError):
    """The engine's answer does not have the shape of a completion."""


def detail_of(row: Mapping[str, Any]) -> str | None:
    """Why a row failed, in the field of ours or where servers of NeMo Gym's put it; None where it does not say."""
    told = (row.get(key) for key in (DETAIL, "_ng_failure_judge_error", "error"))
    return next((str(text) for text in told if text), None)


def classify(error: Exception) -> tuple[FailureKind, str, str]:
    """Kind, code and text of an error that ended a rollout (`roundhouse.health.taxonomy`)."""
    known = typed(error)
    kind = FailureKind.INFRA if kind_of(known) is Kind.INFRA else FailureKind.DATA
    detail = _detail(known) if isinstance(known, RoundhouseError) else f"{type(error).__name__}: {_detail(error)}"
    return kind, code_of(known), detail


def _detail(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    # A verifier's or a proxy's error page may hold megabytes; lone surrogates cannot be written as UTF-8.
    return text[:2000].encode("utf-8", "replace").decode()
