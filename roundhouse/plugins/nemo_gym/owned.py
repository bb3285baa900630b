"""NeMo Gym's servers that belong to a run: started with its engine as their model, and an environment over their
agents.

Invariant: the servers live in one process tree below the flow's, or with `infra.kind: kubernetes` in pods with the
flow's owner, and end with it. Processes that make rollouts find them at the head server of `SERVERS_VARIABLE`, in this
process and its children. The agent that a row names plays it. A row of an unknown agent, and a configuration with a
problem, are refused before any server starts. A rollout that fails while a server is away ends only when all servers
answer again, so that its next attempt finds them.

    with owned_servers(run, config.environment, "http://127.0.0.1:8000", Path(".roundhouse/gym/run")):
        async with open_environment(config.environment) as environment: …
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import httpx

from roundhouse.config.environments import SERVERS_VARIABLE
from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.environments.base import Restoration, TaskRow
from roundhouse.environments.task_files import read_split_rows
from roundhouse.errors import ConfigError, InfraError
from roundhouse.http.clients import http_client
from roundhouse.plugins.nemo_gym.clients.agent import RemoteAgentClient
from roundhouse.plugins.nemo_gym.config.resolve import HEAD_PORT, PORT_RANGE, Resolution, free_port, resolve
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots
from roundhouse.plugins.nemo_gym.section import NemoGymEnvironment
from roundhouse.plugins.nemo_gym.servers.commands import Command, Foreign, commands
from roundhouse.plugins.nemo_gym.servers.head import HEAD_SECONDS, ask_statuses, read_instances
from roundhouse.plugins.nemo_gym.servers.start import LOOK_SECONDS, GymServers, StartOptions
from roundhouse.rollout.agents import RolloutAttempt
from roundhouse.rollout.protocol import ClientWithRows, EnvironmentUnavailable
from roundhouse.store.run import Run

log = logging.getLogger(__name__)

POD_PATH = "/usr/local/bin:/usr/bin:/bin"
"""`PATH` of a foreign server in a pod, after the directory of its interpreter."""


def resolved(
    config: NemoGymEnvironment, engine_url: str, *, choose_ports: bool = True, head_port: int | None = None
) -> Resolution:
    """The configuration of the servers, with the run's engine as the model of their model servers.

    Args:
        choose_ports: False leaves unset ports at -1.
        head_port: None takes a free one.

    Raises:
        ConfigError: with all problems.
    """
    initial = {
        "policy_base_url": f"{engine_url.rstrip('/')}/v1",
        "policy_api_key": "none",
        "policy_model_name": "policy",
        "model_endpoint_readiness_timeout_seconds": 0,  # the run waits for its engine itself
        "head_server": {"port": head_port or free_port(PORT_RANGE, ())},
    }
    roots = SearchRoots.of([Path(each) for each in config.search_dirs], None)
    resolution = resolve(
        config.config_paths, config.overrides, roots, initial=initial, ours=config.ours, choose_ports=choose_ports
    )
    if not resolution.instances and not resolution.problems:
        resolution.problems.append("it names no server")
    _refuse(config, resolution)
    return resolution


def _refuse(config: NemoGymEnvironment, resolution: Resolution) -> None:
    """Raise the problems of a configuration, if it has any, with the key that names it."""
    try:
        resolution.raise_problems()
    except ConfigError as error:
        raise ConfigError(f"environment.config_paths is {', '.join(config.config_paths)}: {error}") from error


def resolved_for_pods(
    config: NemoGymEnvironment, infra: KubernetesInfra, engine_url: str
) -> tuple[Resolution, list[Command]]:
    """Resolve the configuration with the ports and programs of servers in pods; their addresses are still open.

    Raises:
        ConfigError: with all problems, including features that work in processes alone.
    """
    resolution = resolved(config, engine_url, choose_ports=False, head_port=HEAD_PORT)
    roots = SearchRoots.of([Path(each) for each in config.search_dirs], None)
    foreign = Foreign(Path(config.python) if config.python else None)
    known = {"PATH": POD_PATH} | {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    server_commands, problems = commands(resolution, roots, foreign, known)
    from roundhouse.plugins.nemo_gym.servers import pods  # needs the plug-in kubernetes

    pods.choose_ports(resolution, infra)
    resolution.problems = [*pods.unfit_for_pods(resolution, infra), *problems]
    _refuse(config, resolution)
    return resolution, server_commands


def refuse_unfit_pods(config: NemoGymEnvironment, infra: KubernetesInfra) -> None:
    """Raise a ConfigError if the servers cannot run in pods."""
    resolved_for_pods(config, infra, "http://engine")


@contextmanager
def owned_servers(run: Run, config: NemoGymEnvironment, engine_url: str, logs: Path) -> Iterator[str]:
    """The servers, for the time of the block, all healthy at its beginning; the head server's URL.

    Raises:
        ConfigError: the configuration has a problem.
        InfraError: a server could not be started, or did not answer in time.
    """
    infra = run.config.infra.cluster
    if infra is not None:
        from roundhouse.plugins.nemo_gym.servers import pods

        servers = pods.pod_servers(run, config, *resolved_for_pods(config, infra, engine_url), logs)
    else:
        servers = _processes(config, engine_url, logs)
    with servers as url:
        before, os.environ[SERVERS_VARIABLE] = os.environ.get(SERVERS_VARIABLE), url
        try:
            yield url
        finally:
            if before is None:
                del os.environ[SERVERS_VARIABLE]
            else:
                os.environ[SERVERS_VARIABLE] = before


@contextmanager
def _processes(config: NemoGymEnvironment, engine_url: str, logs: Path) -> Iterator[str]:
    resolution = resolved(config, engine_url)
    roots = SearchRoots.of([Path(each) for each in config.search_dirs], None)
    server_commands, resolution.problems = commands(
        resolution, roots, Foreign(Path(config.python) if config.python else None)
    )
    resolution.raise_problems()
    options = StartOptions(
        logs=logs,
        start_seconds=config.start_timeout_seconds,
        ray=any(one.kind == "foreign" for one in resolution.instances) and config.python is None,
        restarts=config.restarts,
        announce=lambda text: log.info("gym: %s", text),
    )
    servers = _Running(GymServers(resolution, server_commands, options))
    try:
        yield servers.ready()
    finally:
        servers.close()


class _Running:
    """The servers in a thread with an event loop."""

    def __init__(self, servers: GymServers) -> None:
        self._servers = servers
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._live()), name="gym servers", daemon=True
        )
        self._thread.start()

    def ready(self) -> str:
        """Wait until all are healthy; the head server's URL."""
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self._servers.head_url

    def close(self) -> None:
        """End them, and wait for that."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _live(self) -> None:
        try:
            async with self._servers as servers:
                if not await servers.start_unless(self._stop):
                    raise InfraError("The servers were stopped while they were starting.")
                self._started.set()
                await servers.until(self._stop)
        except (InfraError, ConfigError, OSError) as error:
            self._error = error
            log.error("NeMo Gym's servers have ended: %s", error)
        finally:
            self._started.set()
        await self._stop.wait()


def agents_of(config: NemoGymEnvironment) -> tuple[str, ...]:
    """Return the names of the agents: from the head server while the servers run, so that a process that only plays
    needs no configuration file; otherwise from the configuration.

    Raises:
        ConfigError: it has a problem, or no agent.
        EnvironmentUnavailable: the head server does not answer.
    """
    if (head := os.environ.get(SERVERS_VARIABLE)) is None:
        return _agents_in(config)
    try:
        with http_client(head, timeout=HEAD_SECONDS) as http:
            answer = http.get(f"{head.rstrip('/')}/server_instances")
    except httpx.HTTPError as error:
        raise EnvironmentUnavailable(f"{SERVERS_VARIABLE} is {head}, which does not answer: {error}") from error
    servers = read_instances(answer.status_code, answer.text, head)
    return tuple(one["process_name"] for one in servers if one["server_type"] == "responses_api_agents")


@functools.lru_cache(maxsize=8)
def _agents_in(config: NemoGymEnvironment) -> tuple[str, ...]:
    resolution = resolved(config, "http://127.0.0.1:1", choose_ports=False)
    agents = tuple(one.name for one in resolution.instances if one.type == "responses_api_agents")
    if not agents:
        raise ConfigError(f"environment.config_paths is {', '.join(config.config_paths)}, which names no agent.")
    return agents


class NemoGymClient(ClientWithRows):
    """The agents of the run's own servers as one environment."""

    name = "nemo_gym"
    restoration: Restoration = "none"

    def __init__(
        self,
        agents: Sequence[str],
        agent: str | None,
        train: Sequence[TaskRow],
        heldout: Sequence[TaskRow],
        *,
        start_seconds: float,
    ) -> None:
        """Make an environment over the agents.

        Args:
            agent: plays rows that name none.
            start_seconds: time limit for the restart of a server that has ended.

        Raises:
            ConfigError: a row names an unknown agent, or none although several exist.
        """
        self._agent = agent or (agents[0] if len(agents) == 1 else None)
        if self._agent is not None and self._agent not in agents:
            raise ConfigError(f"environment.agent is {self._agent!r}; the agents are {', '.join(agents)}.")
        for key, rows in (("train_tasks", train), ("heldout_tasks", heldout)):
            for number, row in enumerate(rows, start=1):
                if (named := self.agent_of(row)) not in agents:
                    raise ConfigError(
                        f"environment.{key}: row {number} names the agent {named!r} (agent_ref.name), but the agents of "
                        f"environment.config_paths are {', '.join(agents)}. Correct the row, or add the agent's configuration."
                    )
        super().__init__(train, heldout)
        self._clients: dict[str, RemoteAgentClient] = {}
        self._start_seconds = start_seconds
        self._waiting = asyncio.Lock()
        self.agent = NemoGymAgent(self)

    @classmethod
    def from_config(cls, config: NemoGymEnvironment) -> Self:
        """The client of a configuration.

        Raises:
            ConfigError: as the class, or the configuration or a file has a problem.
        """
        rows = read_split_rows(config)
        return cls(agents_of(config), config.agent, *rows, start_seconds=config.start_timeout_seconds)

    def agent_of(self, row: TaskRow) -> str | None:
        """The agent that plays a row."""
        reference = row.get("agent_ref")
        named = reference.get("name") if isinstance(reference, dict) else None
        return self._agent if named is None else str(named)

    def client_of(self, agent: str) -> RemoteAgentClient:
        """The client of an agent, which is looked up at the head server.

        Raises:
            EnvironmentUnavailable: the run's servers are not started.
        """
        if agent not in self._clients:
            if (head := os.environ.get(SERVERS_VARIABLE)) is None:
                raise EnvironmentUnavailable(
                    "environment.kind is nemo_gym, but its servers are not started here: a run does that itself. Start them "
                    f"by `roundhouse gym start`, and set {SERVERS_VARIABLE} to the head server's URL."
                )
            own = {split: [row for row in rows if self.agent_of(row) == agent] for split, rows in self._tasks.items()}
            self._clients[agent] = RemoteAgentClient(
                head_server=head, agent=agent, train=own["train"], heldout=own["heldout"]
            )
        return self._clients[agent]

    async def until_all_answer(self) -> None:
        """Wait for ended servers to be started again. Return at once if all run.

        Raises:
            InfraError: the head server does not answer.
        """
        async with self._waiting:  # one rollout asks for all that wait
            deadline = time.monotonic() + self._start_seconds
            while time.monotonic() < deadline:
                if all(one["status"] == "success" for one in await ask_statuses(os.environ[SERVERS_VARIABLE])):
                    return
                await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


class NemoGymAgent:
    """Plays each row by the agent that it names."""

    def __init__(self, client: NemoGymClient) -> None:
        self._client = client

    async def play(self, attempt: RolloutAttempt, environment: object) -> None:
        name = self._client.agent_of(attempt.rollout.task)
        assert name is not None, "rows without an agent were refused"
        attempt.rollout.environment = name
        client = self._client.client_of(name)
        try:
            await client.agent.play(attempt, environment)
        except InfraError:
            with suppress(InfraError):
                await self._client.until_all_answer()
            raise
