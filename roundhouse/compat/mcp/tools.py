"""Tools of MCP servers (Model Context Protocol, streamable HTTP) beside those of an environment.

Invariant: the policy sees an MCP tool as `mcp__<server>__<tool>`, and so does the record; the environment's verifier sees the
bare name. There are two sources of such tools:

    McpEnvironment    servers that the configuration names. All rollouts share a connection to each: tools that keep state for
                      one rollout belong into an environment.
    with_offered      a server that a resources server offers in its answer to /seed_session. The rollout has a connection of
                      its own, whose headers say which session its calls work on; it is closed with the session.

    async with McpEnvironment(environment, {"files": "http://127.0.0.1:9100/mcp"}) as environment:
        rollouts = await collect(specs, policy, environment, config, sampling)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from roundhouse.compat.mcp.connection import McpConnection, bare, bare_response
from roundhouse.environments.base import Restoration, Split, TaskRow, Verdict
from roundhouse.environments.tools import ToolResult
from roundhouse.errors import ConfigError
from roundhouse.rollout.agents import ToolLoop
from roundhouse.rollout.failures import EnvironmentUnreachable, SeedFailed
from roundhouse.rollout.protocol import EnvironmentSession, ToolEnvironment


class McpEnvironment:
    """An environment whose policy may call the tools of MCP servers as well."""

    restoration: Restoration = "none"
    """The servers are shared by all rollouts, so that a call cannot be repeated for one."""

    def __init__(self, environment: ToolEnvironment, servers: Mapping[str, str]) -> None:
        """`servers`: URLs of their MCP endpoints, by the name that stands in the tools' names."""
        self.name = environment.name
        self._environment = environment
        self._servers = servers
        self._connections: list[McpConnection] = []

    @property
    def agent(self) -> ToolLoop:
        return ToolLoop()

    def compute_metrics(self, tasks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        """Those of the environment."""
        compute = getattr(self._environment, "compute_metrics", None)
        return {} if compute is None else compute(tasks)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._environment.tasks(split)

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        return _McpSession(await self._environment.seed_session(row), self._connections)

    async def __aenter__(self) -> Self:
        """Connect to the servers and list their tools.

        Raises:
            ConfigError: a server cannot be reached, or does not speak MCP.
        """
        await self._environment.__aenter__()
        try:
            for server, url in self._servers.items():
                self._connections.append(await McpConnection.open(server, url))
        except EnvironmentUnreachable as error:
            await self.close()
            raise ConfigError(
                f"mcp_servers.{server} is {url}: {error} Is an MCP server with streamable HTTP running there?"
            ) from error
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        while self._connections:
            await self._connections.pop().close()
        await self._environment.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _McpSession:
    """A session of the environment, with MCP tools beside its own."""

    def __init__(self, inner: EnvironmentSession, connections: Sequence[McpConnection]) -> None:
        self._inner = inner
        self._connections = connections
        self.ordered = inner.ordered
        self.tools = [*inner.tools, *(schema for each in connections for schema in each.schemas)]

    @property
    def needs_close(self) -> bool:
        return self._inner.needs_close

    @property
    def answer(self) -> dict[str, Any] | None:
        return self._inner.answer

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        for connection in self._connections:
            if name in connection:
                return await connection.call(name, arguments)
        return await self._inner.call_tool(name, arguments)

    async def verify(self, response: dict[str, Any]) -> Verdict:
        return await self._inner.verify(bare_response(response))

    async def close(self) -> None:
        await self._inner.close()


class _OfferedSession(_McpSession):
    """With a connection that is this session's own."""

    needs_close = True

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()
        if self._inner.needs_close:
            await self._inner.close()


async def with_offered(session: EnvironmentSession, row: TaskRow, base_url: str, offer: Any) -> EnvironmentSession:
    """`session` with the MCP tools of `offer` (`mcp` of an answer to /seed_session), but for those that `row` has already: they
    have plain routes, which cost less.

    Raises:
        SeedFailed: the offer cannot be understood.
        EnvironmentUnreachable: its server cannot be used.
    """
    server, url, headers = _read_offer(offer, base_url)
    connection = await McpConnection.open(server, url, headers)
    offered = _OfferedSession(session, [connection])
    params = row.get("responses_create_params")
    own = {tool.get("name") for tool in (params.get("tools") or [])} if isinstance(params, dict) else set()
    offered.tools = [tool for tool in offered.tools if bare(tool["name"], server) not in own]
    if not offered.tools:
        await connection.close()
        return session
    return offered


def _read_offer(offer: Any, base_url: str) -> tuple[str, str, dict[str, str]]:
    """Server name, URL and headers."""
    where = f"{base_url}/seed_session"
    if not isinstance(offer, dict) or not isinstance(offer.get("server_name"), str):
        raise SeedFailed(f"{where} offers MCP without a server_name: {offer!r}")
    path, headers = offer.get("url_path"), offer.get("headers") or {}
    if offer.get("transport") != "http" or not isinstance(path, str) or not path.startswith("/"):
        raise SeedFailed(
            f"{where} offers MCP by transport {offer.get('transport')!r} at {path!r}; what can be used is http at a path. "
            "environment.session_mcp: false passes the offer over."
        )
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise SeedFailed(f"{where} offers MCP with headers that are no texts: {headers!r}")
    return offer["server_name"], base_url + path, headers
