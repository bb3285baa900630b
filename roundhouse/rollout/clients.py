"""Environment clients: an environment in this process or elsewhere, by configuration.

Invariant: all clients give the same texts, verdicts and kinds of failure for the same environment, so that where it runs is
a matter of configuration. What the clients offer is written in `roundhouse.rollout.protocol`. Those of foreign contracts are in
`roundhouse.compat`, and imported only for a configuration of their kind.

    async with open_environment(config.environment) as environment:
        session = await environment.seed_session(environment.tasks("train")[0])
        result = await session.call_tool("calculate", {"expression": "3*4"})
        verdict = await session.verify(response)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from roundhouse.config.environments import CustomEnvironment, WorkerEnvironment
from roundhouse.config.models import AgentEnvironment, EnvironmentConfig, RemoteEnvironment
from roundhouse.environments import load_any
from roundhouse.environments.base import Environment, Split, TaskRow, Verdict
from roundhouse.environments.gymnasium import GymnasiumEnvironment, GymStep
from roundhouse.environments.tools import Toolbox, ToolResult
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.rollout.agents import GymnasiumLoop, ToolLoop
from roundhouse.rollout.failures import SeedFailed, SnapshotFailed, StepFailed, VerifierFailed
from roundhouse.rollout.protocol import EnvironmentClient, EnvironmentSession, EpisodeSession, ToolEnvironment


class LocalEnvironmentClient:
    """An environment in this process. Its tools run on the event loop: a tool that blocks, blocks all rollouts."""

    def __init__(self, environment: Environment) -> None:
        self.name = environment.name
        self.restoration = environment.restoration
        self.compute_metrics = environment.compute_metrics
        self._environment = environment
        self._toolbox = Toolbox(environment)
        self.agent = ToolLoop()

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

    async def restore_session(self, row: TaskRow, snapshot: Any) -> EnvironmentSession:
        try:
            state = await self._environment.restore_session(row, snapshot)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the environment's code ends here
            raise SnapshotFailed(f"{self.name}: restore_session raised {error!r}") from error
        return _LocalSession(self._environment, self._toolbox, row, state)

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _LocalSession:
    tools: Sequence[dict[str, Any]] = ()
    answer: dict[str, Any] | None = None

    def __init__(self, environment: Environment, toolbox: Toolbox, row: TaskRow, state: Any) -> None:
        self._environment = environment
        self._toolbox = toolbox
        self._row = row
        self._state = state
        self.needs_close = type(environment).close_session is not Environment.close_session
        self.ordered = type(environment).seed_session is not Environment.seed_session

    async def close(self) -> None:
        await self._environment.close_session(self._state)

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        return await self._toolbox.call(self._state, name, arguments)

    async def snapshot(self) -> Any:
        try:
            return await self._environment.snapshot_session(self._state)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the environment's code ends here
            raise SnapshotFailed(f"{self._environment.name}: snapshot_session raised {error!r}") from error

    async def verify(self, response: dict[str, Any]) -> Verdict:
        try:
            return await self._environment.verify(self._state, self._row, response)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the verifier's code ends here; its failure becomes an outcome
            raise VerifierFailed(f"{self._environment.name}: verify raised {error!r}") from error


class LocalEpisodeClient:
    """An environment in this process. Its steps run on the event loop: one that blocks, blocks all rollouts."""

    def __init__(self, environment: GymnasiumEnvironment) -> None:
        self.name = environment.name
        self.restoration = environment.restoration
        self.compute_metrics = environment.compute_metrics
        self._environment = environment
        self.agent = GymnasiumLoop()

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._environment.tasks(split)

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        try:
            state, observation = await self._environment.reset(row)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the environment's code ends here; its failure becomes an outcome
            raise SeedFailed(f"{self.name}: reset raised {error!r}") from error
        return _LocalEpisode(self._environment, state), observation

    async def restore_session(self, row: TaskRow, snapshot: Any) -> EpisodeSession:
        try:
            state = await self._environment.restore(row, snapshot)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the environment's code ends here
            raise SnapshotFailed(f"{self.name}: restore raised {error!r}") from error
        return _LocalEpisode(self._environment, state)

    async def close(self) -> None:
        """Nothing is held open."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _LocalEpisode:
    def __init__(self, environment: GymnasiumEnvironment, state: Any) -> None:
        self._environment = environment
        self._state = state
        self.needs_close = type(environment).close is not GymnasiumEnvironment.close

    async def step(self, response: dict[str, Any]) -> GymStep:
        try:
            step = await self._environment.step(self._state, response)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the environment's code ends here; its failure becomes an outcome
            raise StepFailed(f"{self._environment.name}: step raised {error!r}") from error
        if not isinstance(step, GymStep):
            raise StepFailed(
                f"{self._environment.name}: step returned a {type(step).__name__}; it must return a GymStep."
            )
        return step

    async def snapshot(self) -> Any:
        try:
            return await self._environment.snapshot(self._state)
        except (InfraError, DataError):
            raise
        except Exception as error:  # the environment's code ends here
            raise SnapshotFailed(f"{self._environment.name}: snapshot raised {error!r}") from error

    async def close(self) -> None:
        await self._environment.close(self._state)


def open_environment(config: EnvironmentConfig) -> EnvironmentClient:
    """The client of the environment that `config` describes, with its task lists.

    Raises:
        ConfigError: it cannot be loaded, or a remote one's URL or task files are wrong.
    """
    if isinstance(config, RemoteEnvironment):
        if config.protocol == "gymnasium":
            from roundhouse.compat.nemo_gym.clients.gymnasium import RemoteEpisodeClient

            return RemoteEpisodeClient.from_config(config)
        from roundhouse.compat.nemo_gym.clients.resources import RemoteEnvironmentClient

        return _with_mcp(RemoteEnvironmentClient.from_config(config), config.mcp_servers)
    if isinstance(config, AgentEnvironment):
        from roundhouse.compat.nemo_gym.clients.agent import RemoteAgentClient

        return RemoteAgentClient.from_config(config)
    if isinstance(config, WorkerEnvironment):
        from roundhouse.compat.nexrl.client import WorkerClient

        return WorkerClient.from_config(config)
    environment = load_any(config)
    servers = config.mcp_servers if isinstance(config, CustomEnvironment) else {}
    if isinstance(environment, GymnasiumEnvironment):
        if servers:
            raise ConfigError(
                f"environment.mcp_servers is set, but {environment.name} speaks the Gymnasium protocol, whose world answers "
                "all tool calls itself. Leave it out."
            )
        return LocalEpisodeClient(environment)
    return _with_mcp(LocalEnvironmentClient(environment), servers)


def _with_mcp(environment: ToolEnvironment, servers: Mapping[str, str]) -> ToolEnvironment:
    if not servers:
        return environment
    from roundhouse.compat.mcp.tools import McpEnvironment

    return McpEnvironment(environment, servers)
