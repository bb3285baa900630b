"""The weight transport `adapter`: replicas receive the adapter of `train.lora` alone."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {"weight_transport.adapter": Plugin(f"{__name__}.transport:AdapterTransport")}
