"""Tensors packed into batches, for a broadcast whose ends agree on the cuts without a word.

Invariant: cuts and places follow from the descriptions alone, so whoever has the same descriptions in the same order packs and
unpacks alike. A batch is one tensor or more, and ends with the one that brings it to `bound` bytes.

Example, bound 100: tensors of 60, 60, 300 and 8 bytes -> batches [60, 60], [300], [8]; in the first, the second begins at 64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Bytes. A view of another element type has to begin at a multiple of its size."""


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor without its bytes."""

    name: str
    dtype: str
    """torch's name, e.g. bfloat16."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        import torch

        element: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * element.itemsize


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
    """Where each tensor begins, and the length of the whole."""
    begins, end = [], 0
    for one in batch:
        begins.append(end)
        end += -(-one.bytes // ALIGNMENT) * ALIGNMENT
    return begins, end


def views(packed: torch.Tensor, batch: Sequence[Described]) -> list[tuple[str, torch.Tensor]]:
    """The batch's tensors as views of `packed` ([bytes] uint8)."""
    import torch

    begins, _ = places(batch)
    found = []
    for one, begin in zip(batch, begins, strict=True):
        flat = packed[begin : begin + one.bytes]
        found.append((one.name, flat.view(getattr(torch, one.dtype)).view(one.shape)))
    return found
