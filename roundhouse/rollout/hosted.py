"""Clients of user code that a separate process runs (`environment_process`): an environment, and plain functions.

Invariant: its rollouts are those of the same environment in this process, failures included (`LocalEnvironmentClient`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from roundhouse.activity import ACTIVITY
from roundhouse.config.environments import EnvironmentSection
from roundhouse.environments.base import Environment, GymnasiumEnvironment, GymStep, Split, TaskRow, ToolResult, Verdict
from roundhouse.errors import DataError
from roundhouse.rollout.agents import GymnasiumLoop, ToolLoop
from roundhouse.rollout.environment_process import Answer, EnvironmentProcess, EnvironmentProcesses, HostedCode
from roundhouse.rollout.protocol import ClosedOnExit, SeedFailed, SnapshotFailed, StepFailed, VerifierFailed, rows_of
from roundhouse.user_code import lock_limit


class _HostedSession:
    needs_close = True
    """The process keeps the session until it is closed."""
    names = "snapshot", "close"
    """Names of environment methods."""

    def __init__(self, processes: EnvironmentProcesses, process: EnvironmentProcess, number: int, closes: bool) -> None:
        """`closes`: the environment has code that ends a session."""
        self._processes = processes
        self._process = process
        self._number = number
        self._closes = closes
        self.opening: TaskRow | None = None
        """The row of a session that begins with its first call."""

    async def call(self, operation: str, *arguments: Any, failure: type[DataError] | None = None) -> Any:
        opening, self.opening = self.opening, None
        return await self._process.call(self._number, operation, *arguments, failure=failure, opening=opening)

    async def snapshot(self) -> Any:
        return await self.call(self.names[0], failure=SnapshotFailed)

    async def close(self) -> None:
        try:
            if self._closes and not self._process.ended:
                await self.call(self.names[1])
        finally:
            await self.forget()

    async def forget(self) -> None:
        """Give the session's place back without running code of the environment."""
        self._process.drop(self._number)
        await self._processes.release(self._process)


class _ToolSession(_HostedSession):
    tools: Sequence[dict[str, Any]] = ()
    answer: dict[str, Any] | None = None
    ordered = False
    follows_up = False
    """The environment has code that answers a reply without a tool call."""
    names = "snapshot_session", "close_session"

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        return ToolResult(**await self.call("call_tool", name, arguments, failure=StepFailed))

    async def follow_up(self, response: dict[str, Any]) -> str | None:
        return await self.call("follow_up", response, failure=StepFailed) if self.follows_up else None

    async def verify(self, response: dict[str, Any]) -> Verdict:
        result = await self.call("verify", response, failure=VerifierFailed)
        if isinstance(result, str):
            raise VerifierFailed(f"verify returned a {result}; it must return a Verdict or a number.")
        return Verdict(**result)


class _EpisodeSession(_HostedSession):
    async def step(self, response: dict[str, Any]) -> GymStep:
        result = await self.call("step", response, failure=StepFailed)
        if isinstance(result, str):
            raise StepFailed(f"{self._process.name}: step returned a {result}; it must return a GymStep.")
        return GymStep(**result)


class HostedFunctions(ClosedOnExit):
    """User functions of the section `environment`, which a separate process calls. A call needs no earlier one."""

    def __init__(self, loader: str, argument: Any, name: str) -> None:
        """`loader`, `argument`: as of `HostedCode`; the functions are made by `operations.function_operation`."""
        self._processes = EnvironmentProcesses(HostedCode(loader, argument), name)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        await self._processes.begin()
        return self

    async def close(self) -> None:
        await self._processes.close()

    async def call(
        self,
        name: str,
        *arguments: Any,
        result: type | None = None,
        failure: type[DataError] = VerifierFailed,
        answer: Answer | None = None,
    ) -> Any:
        """Return the result of a function: a JSON value, or a `result`.

        Args:
            name: of the function, for messages too.
            arguments: JSON values; the first is the task row.
            result: the dataclass that the function may return.
            failure: type of the error for a function that raises an error of another type than the following, or returns
                another dataclass.
            answer: answers the questions of a function that asks.

        Raises:
            InfraError, DataError: raised by the function; or its process was lost.
        """
        process = await self._processes.process()
        session = next(self._numbers)
        try:
            kind, value = await process.call(session, name, *arguments, failure=failure, title=name, answer=answer)
        finally:
            process.drop(session)
            await self._processes.release(process)
        if result is not None and kind == result.__name__:
            return result(**value)
        if kind:
            raise failure(f"{name} returned a {kind}.")
        return value


S = TypeVar("S", bound=_HostedSession)


class _HostedClient(ClosedOnExit):
    """Tasks are read from an environment in this process; a separate process plays them."""

    def __init__(
        self, config: EnvironmentSection, environment: Environment | GymnasiumEnvironment, closes: bool
    ) -> None:
        self.name = environment.name
        self.restoration = environment.restoration
        self.compute_metrics = environment.compute_metrics
        self._environment = environment
        self._closes = closes
        code = HostedCode("roundhouse.environments.operations:of_environment", config.model_dump(mode="json"))
        self._processes = EnvironmentProcesses(code, self.name)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        await self._processes.begin()  # no rollout's limit has to wait for imports
        return self

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """Return the task rows of a split.

        Raises:
            ConfigError: the environment's own code fails.
        """
        with ACTIVITY.track("environment", "tasks", where=self.name), lock_limit():
            return rows_of(self._environment, split)

    async def close(self) -> None:
        await self._processes.close()

    async def _session(self, kind: type[S]) -> S:
        return kind(self._processes, await self._processes.process(), next(self._numbers), self._closes)

    async def _begun(self, session: _HostedSession, operation: str, *arguments: Any, failure: type[DataError]) -> Any:
        """The result of a session's first call; without one, the session is over."""
        try:
            return await session.call(operation, *arguments, failure=failure)
        except BaseException:
            await session.forget()
            raise


class HostedEnvironmentClient(_HostedClient):
    """An environment with tools and a verifier."""

    def __init__(self, config: EnvironmentSection, environment: Environment) -> None:
        kind = type(environment)
        super().__init__(config, environment, closes=kind.close_session is not Environment.close_session)
        self._seeds = kind.seed_session is not Environment.seed_session
        self._follows_up = kind.follow_up is not Environment.follow_up
        self.agent = ToolLoop()

    async def seed_session(self, row: TaskRow) -> _ToolSession:
        session = await self._tool_session()
        if self._seeds:
            await self._begun(session, "seed_session", row, failure=SeedFailed)
        else:
            session.opening = row
        return session

    async def restore_session(self, row: TaskRow, snapshot: Any) -> _ToolSession:
        session = await self._tool_session()
        await self._begun(session, "restore_session", row, snapshot, failure=SnapshotFailed)
        return session

    async def _tool_session(self) -> _ToolSession:
        session = await self._session(_ToolSession)
        session.ordered, session.follows_up = self._seeds, self._follows_up
        return session


class HostedEpisodeClient(_HostedClient):
    """An environment of the Gymnasium protocol."""

    def __init__(self, config: EnvironmentSection, environment: GymnasiumEnvironment) -> None:
        closes = type(environment).close is not GymnasiumEnvironment.close
        super().__init__(config, environment, closes)
        self.agent = GymnasiumLoop()

    async def reset(self, row: TaskRow) -> tuple[_EpisodeSession, str | None]:
        session = await self._session(_EpisodeSession)
        return session, await self._begun(session, "reset", row, failure=SeedFailed)

    async def restore_session(self, row: TaskRow, snapshot: Any) -> _EpisodeSession:
        session = await self._session(_EpisodeSession)
        await self._begun(session, "restore", row, snapshot, failure=SnapshotFailed)
        return session
