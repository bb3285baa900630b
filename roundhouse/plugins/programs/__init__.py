"""Programs that call the policy by an SDK: as an environment, started once a rollout, and the model server that they call."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.command": Plugin(
        f"{__name__}.command:CommandClient.from_config", f"{__name__}.section:CommandEnvironment"
    ),
}
