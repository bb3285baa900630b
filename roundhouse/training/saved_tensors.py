"""Tensors of a model or an optimizer on their way into a checkpoint, and out of it, one at a time.

Invariant: of tensors that are spread over ranks, one is gathered at a time, kept by the leading rank alone, and written before
the next is. All ranks go through the tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from roundhouse.training.parallel import Ranks, whole_on_leader
from roundhouse.weight_sync.tensor_files import INDEX, weight_files
from roundhouse.weight_sync.tensor_writer import TensorHeader, TensorWriter, shards


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that is to be saved."""

    shape: torch.Size
    """Of the whole."""
    dtype: torch.dtype
    whole: Callable[[Ranks], torch.Tensor | None]
    """Gathers it on the CPU of the leading rank; None on the others. All take part."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        return cls(tensor.shape, tensor.dtype, lambda ranks: whole_on_leader(tensor, ranks))


SavedTensors = dict[str, SavedTensor]


def save_tensors(tensors: SavedTensors, directory: Path, stem: str, ranks: Ranks) -> None:
    """Write them to `<stem>.safetensors`, or to numbered files and an index; the leading rank writes, all take part."""
    planned = shards(TensorHeader(name, saved.dtype, tuple(saved.shape)) for name, saved in tensors.items())
    order = [header.name for shard in planned for header in shard]
    if not ranks.leads:
        for name in order:
            tensors[name].whole(ranks)
        return
    wholes = ((name, whole) for name in order if (whole := tensors[name].whole(ranks)) is not None)
    writer = TensorWriter(directory)
    writer.write_sharded(stem, planned, wholes)
    writer.close()


def saved_tensors(directory: Path, stem: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that `save_tensors` wrote, by its name; the caller holds one at a time.

    Raises:
        OSError, SafetensorError: a file is missing or damaged.
        DataError: the index is.
    """
    one = directory / f"{stem}.safetensors"
    for path in weight_files(directory, stem) if (directory / f"{stem}{INDEX}").is_file() else [one]:
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
