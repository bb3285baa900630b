"""What the rollout engine needs of an environment and of the agent that plays it, and the ways to fail.

Invariants: every environment client names the agent that plays it, so that the engine knows no protocol; a session belongs to
one rollout, and is closed once, however that rollout ended.

    tools       ToolEnvironment     seed_session, call_tool …, verify       played by agents.ToolLoop
    gymnasium   EpisodeEnvironment  reset, step …                           played by agents.GymnasiumLoop
    agent       an agent server     POST /run plays the whole rollout       played by an agent of its client

Each failure is a type: its base class says whether a retry can help, its name is the failure code. An error that is none of
ours when it ends a rollout, and that the taxonomy does not know either, is a defect and gets the code
`unexpected_error`; it is not retried.

    EnvironmentTimeout(InfraError)  ->  (FailureKind.INFRA, "environment_timeout", text)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from roundhouse.config.models import RetryPolicy
from roundhouse.environments.base import GymStep, Restoration, Split, TaskRow, ToolResult, Verdict
from roundhouse.errors import DataError, InfraError, RoundhouseError
from roundhouse.health.policy import Kind, code_of, kind_of, typed
from roundhouse.retry import Backoff
from roundhouse.trajectories.records import FailureKind, derive_seed

if TYPE_CHECKING:
    from roundhouse.rollout.agents import RolloutAttempt

T = TypeVar("T")

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
    details = (row.get(key) for key in (DETAIL, "_ng_failure_judge_error", "error"))
    return next((str(text) for text in details if text), None)


def classify(error: Exception) -> tuple[FailureKind, str, str]:
    """Kind, code and text of an error that ended a rollout (`roundhouse.health.policy`)."""
    known = typed(error)
    kind = FailureKind.INFRA if kind_of(known) is Kind.INFRA else FailureKind.DATA
    detail = _detail(known) if isinstance(known, RoundhouseError) else f"{type(error).__name__}: {_detail(error)}"
    return kind, code_of(known), detail


def retry_delay(retry: RetryPolicy, attempt: int, seed: int) -> float:
    """Seconds to wait after failed attempt `attempt` (1, 2, …): exponential, the upper half of it at random by `seed`,
    so that rollouts which failed together do not come back together."""
    pause = Backoff(retry.first_delay_seconds, retry.max_delay_seconds, retry.factor).pause(attempt)
    return pause * (0.5 + derive_seed(seed, "retry", attempt) / 2**32)


def _detail(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    # A verifier's or a proxy's error page may hold megabytes; lone surrogates cannot be written as UTF-8.
    return text[:2000].encode("utf-8", "replace").decode()


async def call_function(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function of the user's returns. One that is not `async` runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    result = await in_thread(function, *arguments, **named)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What a plain function returns, from a thread of its own: as many wait at once as rollouts are in flight (a pool has as
    many threads as there are cores, and a few), and one that hangs does not keep the process from its end."""
    loop, context, ended = asyncio.get_running_loop(), contextvars.copy_context(), asyncio.Event()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(context.run(function, *arguments, **named))
        except BaseException as error:  # noqa: BLE001 (raised again where it is awaited)
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="roundhouse-function", daemon=True).start()
    await ended.wait()
    return outcome.result()


async def call_verifier(name: str, verify: Callable[..., Any], *arguments: Any) -> Any:
    """What a verifier of the user's returns.

    Raises:
        VerifierFailed: it raised anything but an InfraError or a DataError, which pass; `name` says which one it was.
    """
    try:
        return await call_function(verify, *arguments)
    except (InfraError, DataError):
        raise
    except Exception as error:  # the verifier's code ends here; its failure becomes an outcome
        raise VerifierFailed(f"{name} raised {error!r}") from error


class Agent(Protocol):
    """Plays rollouts of one environment."""

    async def play(self, attempt: RolloutAttempt, environment: Any) -> None:
        """Play one attempt to its outcome and write it into `attempt.rollout`: status, reward, items, turns.

        Args:
            environment: where the agent begins its session, by the protocol that it plays.

        Raises:
            InfraError, DataError: the attempt failed; what was learnt until then stays in the rollout.
        """
        ...


class RolloutSession(Protocol):
    """One rollout's side of an environment."""

    @property
    def needs_close(self) -> bool:
        """False: there is nothing to give back, and `close` need not be called."""
        ...

    async def close(self) -> None:
        """Give back what the session holds. Never before its last call has returned or was given up."""
        ...


class EnvironmentSession(RolloutSession, Protocol):
    """A session of the tool protocol."""

    @property
    def ordered(self) -> bool:
        """Calls of one reply must run one after the other, since a call may see what an earlier one did."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tools that this session has in addition to those of its row, in the row's form."""
        ...

    @property
    def answer(self) -> dict[str, Any] | None:
        """The verifier's whole answer (row, response, reward and its own fields), once there is one."""
        ...

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        """Call a tool; what goes wrong with it is a text for the policy.

        Raises:
            InfraError: the environment cannot be reached, or says that its infrastructure failed.
        """
        ...

    async def verify(self, response: dict[str, Any]) -> Verdict:
        """Judge the finished rollout (a Responses object with all new items of all turns).

        Raises:
            InfraError: as above; asking again may help.
            DataError: the verifier raised or gave no verdict.
        """
        ...


class EpisodeSession(RolloutSession, Protocol):
    """A session of the Gymnasium protocol."""

    async def step(self, response: dict[str, Any]) -> GymStep:
        """Play the policy's newest answer (a Responses object of that one model call).

        Raises:
            InfraError, DataError: as for a verifier.
        """
        ...


class EnvironmentClient(Protocol):
    """An environment and its tasks. Close it (or use it as an async context manager) in the event loop that used it."""

    name: str

    @property
    def restoration(self) -> Restoration:
        """How an interrupted rollout can resume."""
        ...

    @property
    def agent(self) -> Agent:
        """Who plays it."""
        ...

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """All tasks of a split."""
        ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class ClosedOnExit:
    """An async context manager that closes itself at the end of its block."""

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class ClientWithRows(ClosedOnExit):
    """What environments have in common whose task rows come from files."""

    def __init__(self, train: Sequence[TaskRow] = (), heldout: Sequence[TaskRow] = ()) -> None:
        self._tasks: dict[Split, Sequence[TaskRow]] = {"train": train, "heldout": heldout}

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._tasks[split]


class SeedsSessions(Protocol):
    """Where a rollout of the tool protocol begins."""

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        """Begin a rollout.

        Raises:
            InfraError, DataError: as for the session's calls.
        """
        ...


class ToolEnvironment(EnvironmentClient, SeedsSessions, Protocol):
    """An environment with tools and a verifier."""


class BeginsEpisodes(Protocol):
    """Where a rollout of the Gymnasium protocol begins."""

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        """Begin an episode: its session and the first observation.

        Raises:
            InfraError, DataError: as for the session's calls.
        """
        ...


class EpisodeEnvironment(EnvironmentClient, BeginsEpisodes, Protocol):
    """An environment that speaks the Gymnasium protocol."""


class Snapshotting(Protocol):
    """What a session offers in addition if the environment's `restoration` is snapshot."""

    async def snapshot(self) -> Any:
        """The session as a JSON value.

        Raises:
            InfraError, SnapshotFailed
        """
        ...


class Restorable(Protocol):
    """What the client offers in addition in that case."""

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Any:
        """The session (of either protocol) that a snapshot shows.

        Raises:
            InfraError, DataError
        """
        ...
