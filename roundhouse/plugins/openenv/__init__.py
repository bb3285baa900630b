"""OpenEnv: environments behind its servers, over its WebSocket protocol."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"environment.openenv": Plugin(f"{__name__}.environment:OpenEnv", f"{__name__}.section:OpenEnvSection")}
