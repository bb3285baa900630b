"""Agent servers of NeMo Gym's contract as a source of rollouts: POST /run plays a whole row.

Invariant: a row is posted once; what comes back is the agent's own answer, unchanged, or a typed failure. A 4xx says that the
row is at fault, but for those that ask to try later; a 5xx says nothing about the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import aiohttp

from roundhouse.compat.nemo_gym.clients.connection import Connection, json_object, look_up_all
from roundhouse.compat.nemo_gym.exchange.json_lines import Row
from roundhouse.compat.nemo_gym.exchange.stream import NotReached
from roundhouse.compat.nemo_gym.servers.aggregate import aggregate_metrics
from roundhouse.errors import ConfigError, DataError, InfraError
from roundhouse.rollout.failures import AgentFailed, BadAgentAnswer, EnvironmentUnreachable

RUN_SECONDS = 3600.0
"""Time limit of one /run: a whole rollout, its tools and its verifier."""
SHORT_SECONDS = 60.0
RETRIABLE = frozenset({408, 409, 425, 429})
"""4xx answers that ask to come again."""
MOST_QUOTED = 2000
EVERY = "*"
"""In place of an instance name: the agent server for all rows."""


class AgentRefused(DataError):
    """The agent answered with a 4xx."""


class RowServers:
    """Servers by the instance name of an agent; a row goes to the one that its `agent_ref` names, or to `*`."""

    route: ClassVar[str]
    unavailable: ClassVar[type[InfraError]]
    """Raised for a 5xx, or a request to come again."""
    refused: ClassVar[type[DataError]]
    """Raised for another 4xx."""
    malformed: ClassVar[type[DataError]]
    """Raised for an answer that is no JSON object."""

    def __init__(self, urls: Mapping[str, str], seconds: float = RUN_SECONDS, *, key: str = "--agent-url") -> None:
        """`key` is the option that holds the URLs, for errors. The name `*` stands for every agent."""
        self._connections = {name: Connection(url, seconds, key=key) for name, url in urls.items()}

    async def run(self, row: Row) -> Row:
        connection = self._of(row["agent_ref"]["name"])
        try:
            status, text = await connection.post(self.route, row)
        except EnvironmentUnreachable as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                raise NotReached(str(error)) from error
            raise
        where = f"{connection.url}/{self.route}"
        if status >= 500 or status in RETRIABLE:
            raise self.unavailable(f"{where} answered {status}: {text[:MOST_QUOTED]}")
        if status >= 300:
            raise self.refused(f"{where} answered {status}: {text[:MOST_QUOTED]}")
        return json_object(text, where, self.malformed)

    async def aggregate(self, agent: str, rows: Sequence[Row]) -> Row:
        """The server's own statistics; ours where it has none."""
        connection = self._of(agent)
        try:
            status, text = await connection.post("aggregate_metrics", {"verify_responses": rows}, seconds=SHORT_SECONDS)
        except InfraError:
            return aggregate_metrics(rows)
        return aggregate_metrics(rows) if status >= 300 else json_object(text, connection.url, self.malformed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections.values():
            await connection.close()

    def _of(self, agent: str) -> Connection:
        connection = self._connections.get(agent, self._connections.get(EVERY))
        if connection is None:
            known = ", ".join(self._connections) or "none"
            raise DataError(f"The row's agent_ref names {agent!r}; agents there: {known}.")
        return connection


class AgentServers(RowServers):
    """Agent servers: POST /run plays a whole row."""

    route = "run"
    unavailable = AgentFailed
    refused = AgentRefused
    malformed = BadAgentAnswer


async def agents_of_head(url: str) -> dict[str, str]:
    """The agent servers that a head server knows, as base URLs by instance name.

    Raises:
        InfraError: it does not answer, or not with a configuration.
        ConfigError: it knows no agent that has an address.
    """
    connection = Connection(url, SHORT_SECONDS, key="--head")
    try:
        found = await look_up_all(connection)
    finally:
        await connection.close()
    if not found:
        raise ConfigError(f"--head is {url}, which knows no agent that has an address. Is the configuration started?")
    return found
