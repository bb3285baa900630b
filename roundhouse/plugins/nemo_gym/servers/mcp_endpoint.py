"""The MCP server of an environment."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from itsdangerous import BadSignature, URLSafeSerializer
from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)
from mcp.types import Tool as McpTool
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from roundhouse.environments.base import Tool, ToolResult
from roundhouse.errors import InfraError
from roundhouse.plugins.mcp.client import FAILURE, TOKEN_HEADER, bare_response
from roundhouse.plugins.nemo_gym.servers.endpoints import within

PATH = "/mcp"

_SALT = "roundhouse-mcp-session"

CallTool = Callable[[str, str, Any], Awaitable[ToolResult]]
"""From (session id, tool, arguments) to its result; raises `InfraError`."""


class McpEndpoint:
    """MCP endpoint of one environment server; stateless, each call runs in the session of its rollout.

    Invariant: a call's token alone decides its session, and only this process can sign it. A call with a missing,
    altered or foreign token reaches no session. Names lose this server's prefix before a verdict, so that a rollout is
    judged alike over MCP and over plain routes.

        /seed_session  ->  {"mcp": {"server_name": "calc", "url_path": "/mcp", "transport": "http",
                                    "headers": {"X-NeMo-Gym-Session-Token": "eyJ…"}}}
        POST /mcp with that header: tools/list, tools/call

    The result of a failed tool has `isError` and the text that the plain route would answer. A failure of the
    infrastructure, and an invalid token, are JSON-RPC errors with `data: {"failure": "infra"}`.
    """

    def __init__(self, name: str, tools: Sequence[Tool], call: CallTool, request_seconds: float) -> None:
        """`name`: the instance's, which is part of the tools' full names."""
        self._name = name
        self._tools = [
            McpTool(name=each.name, description=each.description, input_schema=each.parameters) for each in tools
        ]
        self._call = call
        self._seconds = request_seconds
        self._signer = URLSafeSerializer(secrets.token_bytes(32), salt=_SALT)
        self._server: Server[Any] = Server(name, on_list_tools=self._list_tools, on_call_tool=self._call_tool)
        self._manager: StreamableHTTPSessionManager | None = None

    def mount(self, app: FastAPI) -> None:
        """Serve it at /mcp, before the routes that are there."""
        app.router.routes.insert(0, Route(PATH, self, include_in_schema=False))

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """The server's life."""
        self._manager = StreamableHTTPSessionManager(self._server, json_response=True, stateless=True)
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._manager is not None
        await self._manager.handle_request(scope, receive, send)

    def offer(self, session_id: str) -> dict[str, Any]:
        """Return the value of `mcp` in the answer to /seed_session."""
        return {
            "server_name": self._name,
            "url_path": PATH,
            "transport": "http",
            "headers": {TOKEN_HEADER: self._signer.dumps({"sid": session_id})},
        }

    def judged(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """The response as the verifier gets it: tools under their bare names."""
        return bare_response(response, self._name)

    async def _list_tools(self, _: ServerRequestContext, __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=self._tools)

    async def _call_tool(self, context: ServerRequestContext, params: CallToolRequestParams) -> CallToolResult:
        token = "" if context.request is None else context.request.headers.get(TOKEN_HEADER, "")
        if not token:
            raise MCPError(
                INVALID_REQUEST,
                f"The header {TOKEN_HEADER} is missing. Send the value from /seed_session of this rollout.",
                FAILURE,
            )
        try:
            session_id: str = self._signer.loads(token)["sid"]
        except BadSignature as error:
            raise MCPError(
                INVALID_REQUEST,
                f"The header {TOKEN_HEADER} holds no token of this server: it was altered, is another server's, or the "
                "server was restarted. Seed a session and send its token.",
                FAILURE,
            ) from error
        arguments = params.arguments or {}
        try:
            work = self._call(session_id, params.name, arguments)
            result = await within(self._seconds, work, f"{PATH} {params.name}")
        except InfraError as error:
            raise MCPError(INTERNAL_ERROR, repr(error), FAILURE) from error
        return CallToolResult(content=[TextContent(type="text", text=result.text)], is_error=not result.ok)
