"""NeMo Gym: its servers, configurations and files, in both directions, and the environments behind its contracts."""

from __future__ import annotations

import sys

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.remote": Plugin(
        f"{__name__}.clients.resources:open_remote",
        f"{__name__}.section:RemoteEnvironment",
        traits=f"{__name__}.section:REMOTE",
    ),
    "environment.agent": Plugin(
        f"{__name__}.clients.agent:RemoteAgentClient.from_config",
        f"{__name__}.section:AgentEnvironment",
        traits=f"{__name__}.section:AGENT",
    ),
    "environment.nemo_gym": Plugin(
        f"{__name__}.owned:NemoGymClient.from_config",
        f"{__name__}.section:NemoGymEnvironment",
        traits=f"{__name__}.section:NEMO_GYM",
    ),
    "service.gym": Plugin(f"{__name__}:service_command"),
    "command.gym": Plugin(
        f"{__name__}.commands:gym", traits="Environments by NeMo Gym's contracts: configuration, servers, data."
    ),
    "reader.nemo_gym": Plugin(f"{__name__}.exchange.reading:read_files", traits=f"{__name__}.exchange.reading:READER"),
    "writer.nemo_gym": Plugin(f"{__name__}.exchange.reading:write_files"),
}


def service_command(host: str, port: int) -> list[str]:
    """Return the command that serves the environments of this installation."""
    return [sys.executable, "-P", "-m", f"{__name__}.servers.resources", "--host", host, "--port", str(port)]
