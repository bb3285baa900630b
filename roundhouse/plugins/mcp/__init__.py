"""Model Context Protocol: the tools of its servers in an environment, by the key `mcp_servers`."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"operation.mcp_servers": Plugin(f"{__name__}.client:McpEnvironment")}
