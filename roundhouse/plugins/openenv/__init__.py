"""OpenEnv: environments behind its servers, and environments served in its protocol."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.openenv": Plugin(f"{__name__}.environment:OpenEnv", f"{__name__}.section:OpenEnvSection"),
    "command.openenv": Plugin(f"{__name__}.server:app", traits="Serve an environment to clients of OpenEnv."),
}
