"""verifiers: environment packages of its version 1, played in an interpreter of their own."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "environment.verifiers": Plugin(
        f"{__name__}.environment:VerifiersClient.from_config", f"{__name__}.section:VerifiersSection"
    )
}
