"""The weight transport `delta`: replicas receive the changes since their version."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"weight_transport.delta": Plugin(f"{__name__}.transport:DeltaTransport")}
