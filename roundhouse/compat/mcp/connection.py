"""A connection to one MCP server, usable and closable from any task.

Invariant: the SDK's client lives in one task from its opening to its end, as its cancel scopes demand; that task never outlives
`close`. What a tool says is text for the policy, its errors too; a server that cannot be reached, does not answer in time, or
says that its infrastructure failed, fails the attempt as infrastructure.

    library = await McpConnection.open("library", "http://127.0.0.1:9100/mcp")
    result = await library.call("mcp__library__define", {"word": "rail"})
    await library.close()

Names of MCP tools on trajectories, and the words that our MCP server and client share.

Invariant: `mcp__<server>__<tool>` names one tool, since a server's name holds no double underscore; what has no such prefix
passes unchanged.

    bare("mcp__weather__get", None)      == "get"
    bare("mcp__weather__get", "news")    == "mcp__weather__get"
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import Mapping
from typing import Any, Self

import anyio
import httpx2
import orjson
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, CallToolResult, TextContent
from mcp.types import Tool as McpTool

from roundhouse.environments.tools import NOT_FOUND, ToolResult
from roundhouse.rollout.failures import EnvironmentUnavailable, EnvironmentUnreachable

log = logging.getLogger(__name__)

CALL_SECONDS = 600.0
"""Guard of last resort; `rollout.tool_timeout_seconds` is tighter."""
OPEN_SECONDS = 30.0
CLOSE_SECONDS = 5.0
PAGES = 100
"""Of a server's list of tools; one that has more would never end."""
_LOST = (httpx2.HTTPError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError)


class McpConnection:
    """A server's tools, by the names that the policy sees."""

    def __init__(self, server: str, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Use `open`."""
        self.server = server
        self.url = url
        self._headers = dict(headers or {})
        self._tools: dict[str, McpTool] = {}
        self._client: Client | None = None
        self._end = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, server: str, url: str, headers: Mapping[str, str] | None = None) -> Self:
        """Connect and list the tools. `headers` go with every request.

        Raises:
            EnvironmentUnreachable: there is no server, or it does not speak MCP.
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
        assert self._client is not None
        try:
            return _told(await self._client.call_tool(self._tools[name].name, arguments, CALL_SECONDS))
        except MCPError as error:
            if error.data == FAILURE:
                raise EnvironmentUnavailable(f"{name}: {self.url} answered: {error.message}") from error
            if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise EnvironmentUnreachable(f"{name}: {self.url} does not answer: {error.message}") from error
            return ToolResult(orjson.dumps({"error": error.message}).decode(), 400)
        except _LOST as error:
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
        http = httpx2.AsyncClient(headers=self._headers, timeout=limit, verify=_certificates(), trust_env=False)
        try:
            async with http:
                transport = streamable_http_client(self.url, http_client=http)
                async with Client(transport, read_timeout_seconds=OPEN_SECONDS) as client:
                    await self._list(client)
                    self._client = client
                    opened.set_result(None)
                    await self._end.wait()
        except Exception as error:  # noqa: BLE001 - the SDK's transports raise what they like, groups of it too
            if opened.done():
                log.warning("The connection to %s broke: %r", self.url, _cause(error))
            else:
                opened.set_exception(error)

    async def _list(self, client: Client) -> None:
        cursor: str | None = None
        for _ in range(PAGES):
            page = await client.list_tools(cursor=cursor)
            self._tools |= {full(self.server, tool.name): tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                return


def _told(result: CallToolResult) -> ToolResult:
    """The text of a tool's answer; structured content where there is no text."""
    texts = [part.text for part in result.content if isinstance(part, TextContent)]
    text = "\n".join(texts) if texts else orjson.dumps(result.structured_content).decode()
    return ToolResult(text, 500 if result.is_error else 200, is_json=False)


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
"""In a JSON-RPC error of ours: the rollout cannot go on, and another attempt may help. Foreign servers never say it."""
_PREFIX = "mcp__"


def full(server: str, tool: str) -> str:
    """The name that the policy sees."""
    return f"{_PREFIX}{server}__{tool}"


def bare(name: str, server: str | None = None) -> str:
    """The tool's own name. With `server`, only that server's prefix counts."""
    if server is not None:
        return name.removeprefix(full(server, ""))
    if not name.startswith(_PREFIX):
        return name
    _, found, tool = name.removeprefix(_PREFIX).partition("__")
    return tool if found else name


def bare_response(response: Mapping[str, Any], server: str | None = None) -> dict[str, Any]:
    """A Responses object whose tool calls have their bare names."""
    output = response.get("output")
    if not isinstance(output, list):
        return dict(response)
    return {**response, "output": [_bare_item(item, server) for item in output]}


def _bare_item(item: Any, server: str | None) -> Any:
    if not isinstance(item, dict) or item.get("type") != "function_call" or not isinstance(item.get("name"), str):
        return item
    return {**item, "name": bare(item["name"], server)}
