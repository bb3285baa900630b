"""The weight transport `transfer`: weights go straight from the trainer into the engines of replicas, by vLLM's interface."""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "weight_transport.transfer": Plugin(f"{__name__}.transport:TransferTransport", traits=f"{__name__}.traits:TRAITS"),
    "operation.broadcast_seconds": Plugin(f"{__name__}.estimate:broadcast_seconds"),
}
