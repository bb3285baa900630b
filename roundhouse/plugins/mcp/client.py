"""Model Context Protocol (streamable HTTP): servers as tools of an environment.

Invariant: `mcp__<server>__<tool>` names one tool, because a server's name holds no double underscore. The policy and
the record use this name; the environment's verifier gets the bare name. A tool's result is text for the policy,
including its errors. If a server cannot be reached, does not answer in time, or reports a failure of its
infrastructure, the attempt fails as infrastructure.

    McpConnection     a connection to one MCP server
    McpEnvironment    an environment plus the MCP servers that the configuration names
    with_offered      a session plus the MCP server that a resources server offers in its answer to /seed_session

    async with McpEnvironment(environment, {"files": "http://127.0.0.1:9100/mcp"}) as environment:
        rollouts = await collect(specs, policy, environment, config, sampling)
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Self

import anyio
import httpx2
import orjson
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    REQUEST_TIMEOUT,
    TextContent,
)
from mcp.types import Tool as McpTool

from roundhouse.environments.base import NOT_FOUND, Restoration, Split, TaskRow, ToolResult, Verdict
from roundhouse.errors import ConfigError
from roundhouse.http.clients import async_http_client
from roundhouse.rollout.agents import ToolLoop
from roundhouse.rollout.protocol import (
    ClosedOnExit,
    EnvironmentSession,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
    SeedFailed,
    ToolEnvironment,
)

log = logging.getLogger(__name__)

CALL_SECONDS = 600.0
"""Guard of last resort; `rollout.tool_timeout_seconds` is tighter."""
OPEN_SECONDS = 30.0
CLOSE_SECONDS = 5.0
PAGES = 100
"""Limit of the pages in a server's list of tools, so that a reading always ends."""
_LOST = (httpx2.HTTPError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError)


class McpConnection:
    """Connection to one MCP server, with its tools by the names that the policy sees; any task can use and close it.

    Invariant: the SDK's client lives in one task from its opening to its end, as its cancel scopes require. This task
    never outlives `close`.

        library = await McpConnection.open("library", "http://127.0.0.1:9100/mcp")
        result = await library.call("mcp__library__define", {"word": "rail"})
        await library.close()
    """

    def __init__(self, server: str, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Use `open`."""
        self.server = server
        self.url = url
        self._headers = dict(headers or {})
        self._tools: dict[str, McpTool] = {}
        self._client: Client | None = None
        self._is_doubtful = False
        self._end = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, server: str, url: str, headers: Mapping[str, str] | None = None) -> Self:
        """Connect and list the tools. `headers` go with every request.

        Raises:
            EnvironmentUnreachable: no server answers, or it does not speak MCP.
        """
        connection = cls(server, url, headers)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connection._life = asyncio.create_task(connection._live(opened))
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await opened
        except BaseException as error:
            await connection.close()
            if isinstance(error, Exception):
                raise EnvironmentUnreachable(f"{url} cannot be used as an MCP server: {_cause(error)!r}.") from error
            raise
        return connection

    @property
    def is_in_doubt(self) -> bool:
        """It has ended, or a call did not get through: `is_broken` finds out."""
        return self._is_doubtful or self._end.is_set()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as function tools of the Responses API."""
        return [
            {
                "type": "function",
                "name": name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
                "strict": False,
            }
            for name, tool in self._tools.items()
        ]

    async def is_broken(self) -> bool:
        """Return whether the connection is lost: the SDK's transport ends with the first lost request."""
        if self._is_doubtful and self._client is not None and not self._end.is_set():
            try:
                await self._client.list_tools(cache_mode="bypass")
            except Exception as error:  # noqa: BLE001 - whatever it is, a new connection is due
                log.warning("The connection to %s does not answer: %r", self.url, error)
                return True
            self._is_doubtful = False
        return self._end.is_set()

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Call a tool by its full name.

        Raises:
            EnvironmentUnreachable, EnvironmentUnavailable
        """
        if name not in self._tools:
            return NOT_FOUND
        if not isinstance(arguments, dict):
            return ToolResult(orjson.dumps({"error": "the arguments must be a JSON object"}).decode(), 422)
        if self._end.is_set():
            raise EnvironmentUnreachable(f"{name}: the connection to {self.url} has ended.")
        assert self._client is not None
        try:
            # The text of a tool's answer, or its structured content if the texts are missing
            result = await self._client.call_tool(self._tools[name].name, arguments, CALL_SECONDS)
            texts = [part.text for part in result.content if isinstance(part, TextContent)]
            text = "\n".join(texts) if texts else orjson.dumps(result.structured_content).decode()
            return ToolResult(text, 500 if result.is_error else 200, is_json=False)
        except MCPError as error:
            if error.data == FAILURE:
                raise EnvironmentUnavailable(f"{name}: {self.url} answered: {error.message}") from error
            if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                # Only a doubt: servers send this code themselves, and the SDK gives it to a single request as well
                self._is_doubtful = self._is_doubtful or error.code == CONNECTION_CLOSED
                raise EnvironmentUnreachable(f"{name}: {self.url} does not answer: {error.message}") from error
            return ToolResult(orjson.dumps({"error": error.message}).decode(), 400)
        except _LOST as error:
            self._is_doubtful = True
            raise EnvironmentUnreachable(f"{name}: {self.url} cannot be reached: {error!r}") from error

    async def close(self) -> None:
        """End it; raises nothing."""
        if self._life is None:
            return
        self._end.set()
        if self._client is None:
            self._life.cancel()
        _, late = await asyncio.wait({self._life}, timeout=CLOSE_SECONDS)
        for task in late:
            task.cancel()

    async def _live(self, opened: asyncio.Future[None]) -> None:
        limit = httpx2.Timeout(CALL_SECONDS, connect=OPEN_SECONDS)
        http = async_http_client(httpx2, self.url, headers=self._headers, timeout=limit, verify=_certificates())
        try:
            async with http:
                transport = streamable_http_client(self.url, http_client=http)
                async with Client(transport, read_timeout_seconds=OPEN_SECONDS) as client:
                    cursor: str | None = None
                    for _ in range(PAGES):
                        page = await client.list_tools(cursor=cursor)
                        self._tools |= {full(self.server, tool.name): tool for tool in page.tools}
                        if (cursor := page.next_cursor) is None:
                            break
                    self._client = client
                    opened.set_result(None)
                    try:
                        await self._end.wait()
                    finally:
                        self._end.set()  # before the client is taken down, which no call may meet
        except Exception as error:  # noqa: BLE001 - the SDK's transports raise what they like, groups of it too
            if opened.done():
                log.warning("The connection to %s broke: %r", self.url, _cause(error))
            else:
                opened.set_exception(error)


def _cause(error: BaseException) -> BaseException:
    """The first single error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: they take longer to read than a call takes, and each rollout may have a connection."""
    return httpx2.create_ssl_context()


TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
"""Signed: the rollout's session, in requests to /mcp."""
FAILURE = {"failure": "infra"}
"""Marks our own JSON-RPC error: the rollout cannot continue, and another attempt may help. Foreign servers never
use it."""
_PREFIX = "mcp__"


def full(server: str, tool: str) -> str:
    """Return the name that the policy sees."""
    return f"{_PREFIX}{server}__{tool}"


def bare(name: str, server: str | None = None) -> str:
    """Return the tool's bare name.

        bare("mcp__weather__get", None)      == "get"
        bare("mcp__weather__get", "news")    == "mcp__weather__get"

    With `server`, only that server's prefix is removed. A name without the prefix stays unchanged.
    """
    if server is not None:
        return name.removeprefix(full(server, ""))
    if not name.startswith(_PREFIX):
        return name
    _, separator, tool = name.removeprefix(_PREFIX).partition("__")
    return tool if separator else name


def bare_response(response: Mapping[str, Any], server: str | None = None) -> dict[str, Any]:
    """Return a Responses object with bare names in its tool calls."""
    output = response.get("output")
    if not isinstance(output, list):
        return dict(response)
    items = []
    for item in output:
        is_call = isinstance(item, dict) and item.get("type") == "function_call" and isinstance(item.get("name"), str)
        items.append({**item, "name": bare(item["name"], server)} if is_call else item)
    return {**response, "output": items}


class McpEnvironment(ClosedOnExit):
    """Environment that also offers its policy the tools of the MCP servers in the configuration.

    All rollouts share a connection to each server: tools that keep state for one rollout belong in an environment. A
    broken connection is opened again for the next rollout; running calls on the old connection end normally.
    """

    restoration: Restoration = "none"
    """The servers are shared by all rollouts, so that a call cannot be repeated for one."""

    def __init__(self, environment: ToolEnvironment, servers: Mapping[str, str]) -> None:
        """`servers`: URLs of their MCP endpoints, by the name that is part of the tools' names."""
        self.name = environment.name
        self._environment = environment
        self._servers = servers
        self._connections: list[McpConnection] = []
        self._retired: list[McpConnection] = []
        """Replaced connections, on which earlier rollouts may have running calls."""
        self._reopening: asyncio.Task[None] | None = None

    @property
    def agent(self) -> ToolLoop:
        return ToolLoop()

    def compute_metrics(self, tasks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the environment's metrics."""
        compute = getattr(self._environment, "compute_metrics", None)
        return {} if compute is None else compute(tasks)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._environment.tasks(split)

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        """A session; connections that broke are opened anew before it.

        Raises:
            EnvironmentUnreachable: the server of one is still away.
        """
        if any(connection.is_in_doubt for connection in self._connections):
            # One attempt for all rollouts that wait, else each would wait for a server that hangs after those before it
            if self._reopening is None or self._reopening.done():
                self._reopening = asyncio.create_task(self._reopen())
            await asyncio.shield(self._reopening)
        return _McpSession(await self._environment.seed_session(row), tuple(self._connections))

    async def _reopen(self) -> None:
        for place, lost in enumerate(self._connections):
            if await lost.is_broken():
                self._connections[place] = await McpConnection.open(lost.server, lost.url)
                self._retired.append(lost)

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
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait({self._reopening})
        while connections := self._connections or self._retired:
            await connections.pop().close()
        await self._environment.close()


class _McpSession:
    """A session of the environment, with MCP tools in addition to its own."""

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

    async def follow_up(self, response: dict[str, Any]) -> str | None:
        return await self._inner.follow_up(response)

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
    """Add the MCP tools of `offer` (`mcp` of an answer to /seed_session) to `session`. Tools that `row` has already are
    not added: their plain routes cost less.

    Each rollout has a connection with headers that identify the session; it is closed with the session.

    Raises:
        SeedFailed: the offer is malformed.
        EnvironmentUnavailable: its server cannot be used.
    """
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
        raise SeedFailed(f"{where} offers MCP with headers that are not texts: {headers!r}")
    server = offer["server_name"]
    connection = await McpConnection.open(server, base_url + path, headers)
    offered = _OfferedSession(session, [connection])
    params = row.get("responses_create_params")
    own = {tool.get("name") for tool in (params.get("tools") or [])} if isinstance(params, dict) else set()
    offered.tools = [tool for tool in offered.tools if bare(tool["name"], server) not in own]
    if not offered.tools:
        await connection.close()
        return session
    return offered
