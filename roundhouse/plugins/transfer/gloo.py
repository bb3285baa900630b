"""A group of processes on CPUs in which rank 0 sends its weights to all others: packed broadcasts over TCP, by Gloo.

Invariant: waiting is bounded by the group's time limit, for the meeting and for each batch. If a process of the group
dies or stalls, the others raise, and the group is not used again.

While a batch travels, the previous one is loaded (or the next one is packed). The cut into batches and the offsets
follow from the tensors' descriptions alone, so ends with equal descriptions in the same order pack and unpack alike. A
batch has at least one tensor and ends with the tensor that fills it to `bound` bytes.

Example, bound 100: tensors of 60, 60, 300 and 8 bytes -> batches [60, 60], [300], [8]; in the first, the second begins
at 64.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from roundhouse.weight_sync.sending import Described

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

BATCH_BYTES = 64 * 2**20
ALIGNMENT = 16
"""Bytes. A view of another element type has to begin at a multiple of its size."""


def describe(name: str, tensor: torch.Tensor) -> Described:
    return Described(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def batches(tensors: Sequence[Described], bound: int) -> Iterator[list[Described]]:
    """Successive tensors that travel together."""
    batch: list[Described] = []
    size = 0
    for one in tensors:
        batch.append(one)
        size += one.bytes
        if size >= bound:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def places(batch: Sequence[Described]) -> tuple[list[int], int]:
    """Return the offset of each tensor and the total length."""
    begins, end = [], 0
    for one in batch:
        begins.append(end)
        end += -(-one.bytes // ALIGNMENT) * ALIGNMENT
    return begins, end


def views(packed: torch.Tensor, batch: Sequence[Described]) -> list[tuple[str, torch.Tensor]]:
    """The batch's tensors as views of `packed` ([bytes] uint8)."""
    import torch

    begins, _ = places(batch)
    tensors = []
    for one, begin in zip(batch, begins, strict=True):
        flat = packed[begin : begin + one.bytes]
        tensors.append((one.name, flat.view(getattr(torch, one.dtype)).view(one.shape)))
    return tensors


def own_address(peer: str, port: int) -> str:
    """This machine's address on the way to a peer. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class GlooGroup:
    """One process's end of the group.

    Args:
        store: meeting point of the ranks, used by this group only.
        address: address of this process for the others.
        seconds: time limit of the meeting, and of each batch.

    Raises:
        RuntimeError: a process was missing at the limit.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str, seconds: float) -> None:
        import torch.distributed

        gloo: Any = torch.distributed.ProcessGroupGloo  # torch's stubs know little of it
        self._limit = timedelta(seconds=seconds)
        options = gloo._Options()
        options._timeout = self._limit
        options._devices = [gloo.create_device(hostname=address)]
        store.set_timeout(self._limit)
        self._group = gloo(store, rank, size, options)
        self._group.barrier().wait(self._limit)

    def send(
        self, described: Sequence[Described], tensors: Iterable[tuple[str, torch.Tensor]], bound: int = BATCH_BYTES
    ) -> None:
        """From rank 0: the tensors, which must come in the order of their descriptions."""
        source = iter(tensors)
        before: Any = None
        for batch in batches(described, bound):
            packed = self._room(batch)
            for (expected, place), (name, tensor) in zip(views(packed, batch), islice(source, len(batch)), strict=True):
                if name != expected or tensor.dtype != place.dtype or tensor.shape != place.shape:
                    raise ValueError(f"{name} came where {expected} was described.")
                place.copy_(tensor)
            work = self._broadcast(packed)
            if before is not None:
                before.wait(self._limit)
            before = work
        if before is not None:
            before.wait(self._limit)

    def receive(
        self, described: Sequence[Described], bound: int = BATCH_BYTES
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """At every other rank: the tensors batch by batch; a batch's memory is its own."""
        before: tuple[list[Described], torch.Tensor, Any] | None = None
        for batch in batches(described, bound):
            packed = self._room(batch)
            work = self._broadcast(packed)
            if before is not None:
                yield self._arrived(*before)
            before = (batch, packed, work)
        if before is not None:
            yield self._arrived(*before)

    def _arrived(self, batch: list[Described], packed: torch.Tensor, work: Any) -> list[tuple[str, torch.Tensor]]:
        work.wait(self._limit)
        return views(packed, batch)

    def _broadcast(self, packed: torch.Tensor) -> Any:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._limit
        return self._group.broadcast([packed], options)

    @staticmethod
    def _room(batch: Sequence[Described]) -> torch.Tensor:
        import torch

        _, size = places(batch)
        return torch.empty(size, dtype=torch.uint8)
