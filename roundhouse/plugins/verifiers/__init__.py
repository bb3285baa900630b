"""verifiers: environment packages of its version 1, played in an interpreter of their own, and the traces that it saves."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.verifiers": Plugin(
        f"{__name__}.environment:VerifiersClient.from_config",
        f"{__name__}.section:VerifiersSection",
        packages=("verifiers==0.4.0", "uv>=0.8"),  # its harnesses install their packages by uv
    ),
    "reader.verifiers": Plugin(f"{__name__}.reader:read", traits=f"{__name__}.reader:READER"),
}
