"""What an agent loop needs of an environment: begin a session, call tools, get a verdict; in this process or over HTTP.

Invariant: both clients give the same texts, verdicts and kinds of failure for the same environment, so that where it runs is
a matter of configuration. A session belongs to one rollout.

    async with open_environment(config.environment) as environment:
        session = await environment.seed_session(environment.tasks("train")[0])
        result = await session.call_tool("calculate", {"expression": "3*4"})
        verdict = await session.verify(response)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from roundhouse.config.models import EnvironmentConfig, RemoteEnvironment
from roundhouse.errors import DataError, InfraError
from roundhouse.gym.environment import Environment, Split, TaskRow, Verdict
from roundhouse.gym.failures import SeedFailed, VerifierFailed
from roundhouse.gym.tools import Toolbox, ToolResult


class EnvironmentSession(Protocol):
    """One rollout's side of an environment."""

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


class EnvironmentClient(Protocol):
    """An environment and its tasks. Close it (or use it as an async context manager) in the event loop that used it."""

    name: str

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        """All tasks of a split."""
        ...

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        """Begin a rollout.

        Raises:
            InfraError, DataError: as for the session's calls.
        """
        ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class LocalEnvironmentClient:
    """An environment in this process. Its tools run on the event loop: a tool that blocks, blocks all rollouts."""

    def __init__(self, environment: Environment) -> None:
        self.name = environment.name
        self._environment = environment
        self._toolbox = Toolbox(environment)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._environment.tasks(split)

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        try:
            state = await self._environment.seed_session(row)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the environment's code ends here; its failure becomes an outcome
            raise SeedFailed(f"{self.name}: seed_session raised {error!r}") from error
        return _LocalSession(self._environment, self._toolbox, row, state)

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _LocalSession:
    def __init__(self, environment: Environment, toolbox: Toolbox, row: TaskRow, state: Any) -> None:
        self._environment = environment
        self._toolbox = toolbox
        self._row = row
        self._state = state

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        return await self._toolbox.call(self._state, name, arguments)

    async def verify(self, response: dict[str, Any]) -> Verdict:
        try:
            return await self._environment.verify(self._state, self._row, response)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the verifier's code ends here; its failure becomes an outcome
            raise VerifierFailed(f"{self._environment.name}: verify raised {error!r}") from error


def open_environment(config: EnvironmentConfig) -> EnvironmentClient:
    """The client of the environment that `config` describes, with its task lists.

    Raises:
        ConfigError: it cannot be loaded, or a remote one's URL or task files are wrong.
    """
    if isinstance(config, RemoteEnvironment):
        from roundhouse.gym.remote import RemoteEnvironmentClient

        return RemoteEnvironmentClient.from_config(config)
    from roundhouse.gym.environments import load

    return LocalEnvironmentClient(load(config))
