"""The weight transport `shared-memory`: the flow and the engine of one node map the same weights."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"weight_transport.shared-memory": Plugin(f"{__name__}.transport:SharedMemoryTransport")}
