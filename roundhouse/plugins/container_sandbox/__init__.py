"""Docker and Podman: a container as a sandbox."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"sandbox.container": Plugin(f"{__name__}.sandbox:Container", f"{__name__}.section:ContainerSandbox")}
