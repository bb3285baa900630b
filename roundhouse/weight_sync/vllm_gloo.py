"""A weight-transfer engine for vLLM that needs no GPU: tensors come by Gloo, and are loaded as vLLM's `nccl` engine loads them.

Invariant: it differs from vLLM's `nccl` engine in name and time limits alone: the same steps (init, start, update, finish,
shutdown) with the same names of their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from roundhouse.weight_sync.gloo import BATCH_BYTES, Described, GlooGroup, own_address

NAME = "gloo"


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker finds its group. Fields that `nccl` has too mean the same."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of this engine's first worker."""
    world_size: int
    packed_buffer_size_bytes: int = BATCH_BYTES
    group: str
    """Prefix of this group's keys in the store at `master_address`."""
    seconds: float
    """Time limit of the meeting, and of each batch."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What comes, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A worker's end."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: GlooGroup | None = None
    _bound = BATCH_BYTES

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        from torch.distributed import PrefixStore, TCPStore

        limit = timedelta(seconds=init_info.seconds)
        address, port = init_info.master_address, init_info.master_port
        store = TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
        # The rank as vLLM's nccl engine counts it: over data-parallel engines, then over the workers of one.
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        own = own_address(address, port)
        self._bound = init_info.packed_buffer_size_bytes
        self._group = GlooGroup(PrefixStore(init_info.group, store), rank, init_info.world_size, own, init_info.seconds)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._group is None:
            raise RuntimeError("There is no group to receive weights from. Call init_transfer_engine first.")
        given = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        described = [Described(name, dtype, tuple(shape)) for name, dtype, shape in given]
        with disable_mtp_completeness_check():
            for tensors in self._group.receive(described, self._bound):
                self.model.load_weights(tensors)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None


def register() -> None:
    """Make it known to vLLM in this process, by name."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, GlooWeightTransferEngine)
