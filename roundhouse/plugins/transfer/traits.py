"""Traits of the transport `transfer`."""

from __future__ import annotations

from roundhouse.config.generation import TransportTraits

TRAITS = TransportTraits(
    vllm_engines={"gloo": "roundhouse.plugins.transfer.vllm_receiver:GlooWeightTransferEngine", "nccl": ""}
)
