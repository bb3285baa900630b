"""Contracts between the rollout engine, environments and agents, and the typed failures.

Invariants: every environment client names its agent, so the engine depends on no protocol. A session belongs to one
rollout and is closed exactly once.

    tools       ToolEnvironment     seed_session, call_tool …, verify       played by agents.ToolLoop
    gymnasium   EpisodeEnvironment  reset, step …                           played by agents.GymnasiumLoop
    agent       an agent server     POST /run plays the whole rollout       played by its client's agent

Each failure is a type: the base class decides about retries and the name gives the failure code. Any other exception
that ends a rollout is a defect: it gets the code `unexpected_error` and is not retried.

    EnvironmentTimeout(InfraError)  ->  (FailureKind.INFRA, "environment_timeout", text)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from roundhouse.config.models import RetryPolicy
from roundhouse.environments.base import GymStep, Restoration, Split, TaskRow, TaskSource, ToolResult, Verdict
from roundhouse.errors import ConfigError, DataError, InfraError, RoundhouseError
from roundhouse.health.policy import Kind, code_of, kind_of, typed
from roundhouse.retry import Backoff
from roundhouse.trajectories.records import FailureKind, derive_seed
from roundhouse.trajectories.storable import storable_text
from roundhouse.user_code import describe_error, running_here

if TYPE_CHECKING:
    from roundhouse.rollout.agents import RolloutAttempt

T = TypeVar("T")

FAILURE_HEADER = "X-Roundhouse-Failure"
"""Our servers set this header to `infra` for infrastructure failures of the environment, and to `data` if its code raised.
Foreign servers never set it."""
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
    """The resources server answered with a 5xx: it is overloaded, restarting or broken, or a service behind it is down."""


class EnvironmentLost(InfraError):
    """The process of an environment ended, or a session in it could not be continued."""


class EnvironmentRestarted(InfraError):
    """The process of an environment was replaced because of another rollout's call. Such an attempt is not counted."""


class EnvironmentBlocked(DataError):
    """A call of an environment held the interpreter's lock, so that its process had to be killed."""


class ToolTimeout(InfraError):
    """A tool call exceeded `rollout.tool_timeout_seconds`."""


class RolloutTimeout(InfraError):
    """A rollout exceeded `rollout.timeout_seconds`."""


class JudgeFailed(InfraError):
    """The verifier's judge could not be asked; it may answer another time."""


class BadTaskRow(DataError):
    """The task row is not JSON, or does not have the shape that `responses_create_params` must have."""


class SeedFailed(DataError):
    """The environment could not begin a session for the row."""


class SnapshotFailed(DataError):
    """The environment could not write its session down, or not restore it."""


class VerifierFailed(DataError):
    """The verifier raised an exception or returned an invalid verdict."""


class StepFailed(DataError):
    """The environment failed to play a step or returned an invalid one."""


class AgentUnavailable(InfraError):
    """The agent server answered that it cannot serve now."""


class AgentFailed(InfraError):
    """The agent reports that the rollout failed; it may succeed another time."""


class AgentGaveUp(DataError):
    """The agent reports a failure that will not pass, or refuses the row."""


class BadAgentAnswer(DataError):
    """The agent's reply is not a valid rollout."""


class NoTrainableTokens(DataError):
    """A rollout for training came without token IDs."""


class UnknownAgent(DataError):
    """The head server knows no such agent."""


class BadCompletion(DataError):
    """The engine's answer does not have the shape of a completion."""


def detail_of(row: Mapping[str, Any]) -> str | None:
    """Return the failure detail of a row, from our field or NeMo Gym's; None if it is missing."""
    details = (row.get(key) for key in (DETAIL, "_ng_failure_judge_error", "error"))
    return next((str(text) for text in details if text), None)


def classify(error: Exception) -> tuple[FailureKind, str, str]:
    """Kind, code and text of an error that ended a rollout (`roundhouse.health.policy`)."""
    known = typed(error)
    kind = FailureKind.INFRA if kind_of(known) is Kind.INFRA else FailureKind.DATA
    detail = _detail(known) if isinstance(known, RoundhouseError) else f"{type(error).__name__}: {_detail(error)}"
    return kind, code_of(known), detail


def at_limit(error: TimeoutError, failure: InfraError) -> InfraError | DataError:
    """Return the failure of a call that reached its time limit.

    An environment's process may know more than the limit, and leaves it in the arguments of the cancellation: the line at which
    the call blocks, which is added to `failure`, or the failure itself.
    """
    known = error.__cause__.args[:1] if isinstance(error.__cause__, asyncio.CancelledError) else ()
    if known and isinstance(known[0], (InfraError, DataError)):
        return known[0]
    return type(failure)(f"{failure} It stands at {known[0]}.") if known and known[0] else failure


async def results_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of work that runs at once, in its order. The first failure ends the others.

    A cancellation keeps the arguments that a part of the work left in its own, for `at_limit`.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    except asyncio.CancelledError as cancellation:
        for task in filter(asyncio.Task.cancelled, tasks):
            try:
                task.result()
            except asyncio.CancelledError as own:
                cancellation.args = own.args or cancellation.args
        raise
    return [task.result() for task in tasks]


def retry_delay(retry: RetryPolicy, attempt: int, seed: int) -> float:
    """Seconds to wait after failed attempt `attempt` (1, 2, …): exponential, the upper half of it at random by `seed`,
    so that rollouts which failed together do not come back together."""
    pause = Backoff(retry.first_delay_seconds, retry.max_delay_seconds, retry.factor).pause(attempt)
    return pause * (0.5 + derive_seed(seed, "retry", attempt) / 2**32)


def _detail(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return storable_text(text[:2000])  # a verifier's or a proxy's error page may hold megabytes


async def call_function(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a user's function and return its result. Functions that are not `async` run in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    result = await in_thread(function, *arguments, **named)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run a plain function in a new thread and return its result.

    A pool would limit waiting calls to a few per core, and a hanging call would keep the process from exiting.
    """
    loop, context, ended = asyncio.get_running_loop(), contextvars.copy_context(), asyncio.Event()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def marked() -> T:
        with running_here():
            return function(*arguments, **named)

    def run() -> None:
        try:
            outcome.set_result(context.run(marked))
        except BaseException as error:  # noqa: BLE001 (raised again where it is awaited)
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="roundhouse-function", daemon=True).start()
    await ended.wait()
    return outcome.result()


def as_verdict(verdict: object) -> Verdict:
    """Return the result of a verifier as a verdict; a plain number is the reward.

    Raises:
        VerifierFailed: it is neither.
    """
    if isinstance(verdict, Real):
        return Verdict(verdict)  # type: ignore[arg-type]  # any real number, which the agent converts and checks
    if not isinstance(verdict, Verdict):
        raise VerifierFailed(f"verify returned a {type(verdict).__name__}; it must return a Verdict or a number.")
    return verdict


def rows_of(environment: TaskSource, split: Split) -> Sequence[TaskRow]:
    """Return the task rows of a split.

    Raises:
        ConfigError: the environment's own code fails.
    """
    try:
        return environment.tasks(split)
    except RoundhouseError:
        raise
    except Exception as error:  # the environment's code ends here
        raise ConfigError(f"{environment.name}: tasks({split!r}) raised {describe_error(error)}.") from error


async def call_verifier(name: str, verify: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's verifier and return its result.

    Raises:
        VerifierFailed: it raised an exception other than InfraError or DataError, which pass; `name` names the
            verifier.
    """
    try:
        return await call_function(verify, *arguments)
    except (InfraError, DataError):
        raise
    except Exception as error:  # the verifier's code ends here; its failure becomes an outcome
        row = next((argument for argument in arguments if isinstance(argument, dict)), None)
        raise VerifierFailed(f"{name} raised {describe_error(error, row)}") from error


class Agent(Protocol):
    """Plays rollouts of one environment."""

    async def play(self, attempt: RolloutAttempt, environment: Any) -> None:
        """Play one attempt to its outcome and write status, reward, items and turns into `attempt.rollout`.

        Args:
            environment: client of the protocol that the agent plays.

        Raises:
            InfraError, DataError: the attempt failed; the rollout keeps everything recorded so far.
        """
        ...


class RolloutSession(Protocol):
    """One rollout's side of an environment."""

    @property
    def needs_close(self) -> bool:
        """Whether `close` must be called."""
        ...

    async def close(self) -> None:
        """Release the session's resources. Called only after its last call has returned or was abandoned."""
        ...


class EnvironmentSession(RolloutSession, Protocol):
    """A session of the tool protocol."""

    @property
    def ordered(self) -> bool:
        """Whether the calls of one reply run one after the other because a call may depend on the previous one."""
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
        """Call a tool. Errors of the tool are returned as text for the policy.

        Raises:
            InfraError: the environment cannot be reached or reports an infrastructure failure.
        """
        ...

    async def follow_up(self, response: dict[str, Any]) -> str | None:
        """Return the user message that answers a reply without a tool call (a Responses object of that one model call); None
        ends the rollout.

        Raises:
            InfraError, DataError: as `verify`.
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
        """Return the method by which an interrupted rollout resumes."""
        ...

    @property
    def agent(self) -> Agent:
        """Return the agent that plays this environment."""
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
    """Base of clients with task rows from files."""

    def __init__(self, train: Sequence[TaskRow] = (), heldout: Sequence[TaskRow] = ()) -> None:
        self._tasks: dict[Split, Sequence[TaskRow]] = {"train": train, "heldout": heldout}

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._tasks[split]


class SeedsSessions(Protocol):
    """A client that starts sessions of the tool protocol."""

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        """Begin a rollout.

        Raises:
            InfraError, DataError: as for the session's calls.
        """
        ...


class ToolEnvironment(EnvironmentClient, SeedsSessions, Protocol):
    """An environment with tools and a verifier."""


class BeginsEpisodes(Protocol):
    """A client that starts episodes of the Gymnasium protocol."""

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        """Begin an episode: its session and the first observation.

        Raises:
            InfraError, DataError: as for the session's calls.
        """
        ...


class EpisodeEnvironment(EnvironmentClient, BeginsEpisodes, Protocol):
    """An environment that speaks the Gymnasium protocol."""


class Snapshotting(Protocol):
    """A session that can be written as a snapshot (`restoration` is snapshot)."""

    async def snapshot(self) -> Any:
        """The session as a JSON value.

        Raises:
            InfraError, SnapshotFailed
        """
        ...


class Restorable(Protocol):
    """A client that can restore sessions from snapshots."""

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Any:
        """The session (of either protocol) that a snapshot shows.

        Raises:
            InfraError, DataError
        """
        ...
