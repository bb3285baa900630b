"""A weight-transfer engine of vLLM that needs no GPU, in vLLM's workers.

Tensors arrive by Gloo, and are loaded as vLLM's `nccl` engine loads them. It differs from that engine only in name and time
limits: the steps (init, start, update, finish, shutdown) and their argument names are the same.
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

from roundhouse.plugins.transfer.gloo import BATCH_BYTES, GlooGroup, own_address
from roundhouse.weight_sync.sending import Described


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """Address of a worker's group. Fields that `nccl` also has mean the same."""

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
    """Descriptions of the arriving tensors, in order."""

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
            raise RuntimeError("The group that sends weights is missing. Call init_transfer_engine first.")
        descriptions = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        described = [Described(name, dtype, tuple(shape)) for name, dtype, shape in descriptions]
        with disable_mtp_completeness_check():
            for tensors in self._group.receive(described, self._bound):
                self.model.load_weights(tensors)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._group = None
