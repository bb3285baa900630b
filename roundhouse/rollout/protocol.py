"""What the rollout engine needs of an environment, and of the agent that plays it.

Invariant: every environment client says itself which agent plays it, so that the engine knows no protocol; a session belongs to
one rollout, and is closed once, however that rollout ended.

    tools       ToolEnvironment     seed_session, call_tool …, verify       played by agents.tool_loop
    gymnasium   EpisodeEnvironment  reset, step …                           played by agents.gymnasium
    agent       an agent server     POST /run plays the whole rollout       played by agents.remote_agent
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from roundhouse.environments.base import Restoration, Split, TaskRow, Verdict
from roundhouse.environments.gymnasium import Step
from roundhouse.environments.tools import ToolResult

if TYPE_CHECKING:
    from roundhouse.rollout.attempt import Attempt


class Agent(Protocol):
    """Plays rollouts of one environment."""

    async def play(self, attempt: Attempt) -> None:
        """Play one attempt to its outcome and write it into `attempt.rollout`: status, reward, items, turns.

        Raises:
            InfraError, DataError: the attempt failed; what was learnt until then stays in the rollout.
        """
        ...


class Session(Protocol):
    """One rollout's side of an environment."""

    @property
    def needs_close(self) -> bool:
        """False: there is nothing to give back, and `close` need not be called."""
        ...

    async def close(self) -> None:
        """Give back what the session holds. Never before its last call has returned or was given up."""
        ...


class EnvironmentSession(Session, Protocol):
    """A session of the tool protocol."""

    @property
    def ordered(self) -> bool:
        """Calls of one reply must run one after the other, since a call may see what an earlier one did."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tools that this session has beside those of its row, as they would stand there."""
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


class EpisodeSession(Session, Protocol):
    """A session of the Gymnasium protocol."""

    async def step(self, response: dict[str, Any]) -> Step:
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
        """How an interrupted rollout can go on."""
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


class ToolEnvironment(EnvironmentClient, Protocol):
    """An environment with tools and a verifier."""

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        """Begin a rollout.

        Raises:
            InfraError, DataError: as for the session's calls.
        """
        ...


class EpisodeEnvironment(EnvironmentClient, Protocol):
    """An environment that speaks the Gymnasium protocol."""

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        """Begin an episode: its session and the first observation.

        Raises:
            InfraError, DataError: as for the session's calls.
        """
        ...


class Snapshotting(Protocol):
    """What a session offers beside its protocol where the environment's `restoration` is snapshot."""

    async def snapshot(self) -> Any:
        """The session as a JSON value.

        Raises:
            InfraError, SnapshotFailed
        """
        ...


class Restorable(Protocol):
    """What the client offers beside its protocol there."""

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Any:
        """The session (of either protocol) that a snapshot shows.

        Raises:
            InfraError, DataError
        """
        ...
