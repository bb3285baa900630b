"""The sending end of vLLM's own `nccl` engine.

Invariant: vLLM's sender is used as it is, with one difference: it drives no replica. Each comes by the wish and takes vLLM's
steps by itself, so what the sender would call on them does nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from roundhouse.weight_sync.packed import Described

if TYPE_CHECKING:
    import torch


class _Driven:
    """vLLM's `VLLMWeightSyncClient`: the replicas drive themselves."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def send(init: dict[str, Any], described: Sequence[Described], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Broadcast from this process's GPU to the group that `init` tells of."""
    import torch
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Files(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(one.name, getattr(torch, one.dtype), one.shape) for one in described]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return ((name, tensor.cuda()) for name, tensor in tensors)

    fields = ("master_address", "master_port", "world_size", "packed", "packed_buffer_size_bytes")
    info = NCCLTrainerInitInfo(rank=0, **{name: init[name] for name in fields})
    engine = WeightTransferTrainerFactory.trainer_init(info, client=_Driven(), source=Files())
    try:
        engine.send_weights()
    finally:
        engine.shutdown()
