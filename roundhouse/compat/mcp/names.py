"""Names of MCP tools on trajectories, and the words that our MCP server and client share.

Invariant: `mcp__<server>__<tool>` names one tool, since a server's name holds no double underscore; what has no such prefix
passes unchanged.

    bare("mcp__weather__get", None)      == "get"
    bare("mcp__weather__get", "news")    == "mcp__weather__get"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
