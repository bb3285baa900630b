"""Safetensors files written tensor by tensor, hashed in passing: of a model, or of another directory's tensors changed.

Invariants: one tensor is in memory at a time, whatever the size of the model; every byte is hashed once as a part of its file
and once as a part of its tensor while it is written, and nothing is read back. The bytes are those of
`safetensors.torch.save_file`. Beside the files lies what was found of them (`store.directories.FileDigests`), for the
upload and the next load.

    model.safetensors                                             up to SHARD_BYTES
    model-00001-of-00003.safetensors … model.safetensors.index.json      above
    digests.json
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roundhouse.store import disk
from roundhouse.store.directories import FileDigests
from roundhouse.store.manifest import FileEntry
from roundhouse.weight_sync.tensor_files import (
    SAFETENSORS_NAMES,
    copy_side_files,
    digest_of_tensors,
    tensor_digest,
    weight_files,
)

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 * 2**30
"""A file of tensors takes no more, but for a tensor that alone is larger: readers hold a file's pages until they are done."""
_CHUNK_BYTES = 2**20
"""Written, then hashed twice while a core's cache holds it."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor without its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(name: str, tensor: torch.Tensor) -> TensorHeader:
    return TensorHeader(name, tensor.dtype, tuple(tensor.shape))


def shards(headers: Iterable[TensorHeader], limit: int = SHARD_BYTES) -> list[list[TensorHeader]]:
    """The tensors of each file, in the order of their bytes: large elements first, then by name, as safetensors aligns them."""
    found: list[list[TensorHeader]] = [[]]
    size = 0
    for header in headers:
        if found[-1] and size + header.bytes > limit:
            found.append([])
            size = 0
        found[-1].append(header)
        size += header.bytes
    return [sorted(shard, key=lambda one: (-one.dtype.itemsize, one.name)) for shard in found]


class TensorWriter:
    """Writes the files of one directory; leave it by `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, FileEntry] = {}
        self._tensors: dict[str, str] = {}

    def write(self, name: str, headers: Sequence[TensorHeader], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a file.

        Args:
            headers: in the order of the tensors.
        """
        path, whole, size = self._directory / name, hashlib.sha256(), 0
        with path.open("wb") as stream:

            def put(data: bytes | memoryview) -> None:
                nonlocal size
                stream.write(data)
                whole.update(data)
                size += len(data)

            put(_header_bytes(headers))
            for header, (came, tensor) in zip(headers, tensors, strict=True):
                if header_of(came, tensor) != header:
                    raise ValueError(f"{came} came where {header} was announced.")
                own = hashlib.sha256()
                data = _bytes_of(tensor)
                for begin in range(0, len(data), _CHUNK_BYTES):
                    chunk = data[begin : begin + _CHUNK_BYTES]
                    put(chunk)
                    own.update(chunk)
                self._tensors[came] = tensor_digest(SAFETENSORS_NAMES[_dtype(header)], header.shape, own.hexdigest())
        stamp = disk.settle(path, sync=False)
        self._files[name] = FileEntry(path=name, size=size, sha256=whole.hexdigest(), stamp=stamp)

    def write_sharded(
        self, stem: str, planned: Sequence[Sequence[TensorHeader]], tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Write `<stem>.safetensors`, or numbered files and their index.

        Args:
            planned: of `shards`; the tensors come in this order.
        """
        for name, headers in zip(file_names(stem, len(planned)), planned, strict=True):
            self.write(name, headers, _taken(tensors, len(headers)))
        write_index(self._directory, stem, planned)

    def found(self) -> tuple[dict[str, FileEntry], dict[str, str]]:
        """The files written so far, and the digest of each tensor in them."""
        return self._files, self._tensors

    def add(self, files: dict[str, FileEntry], tensors: dict[str, str]) -> None:
        """Take what another writer of the directory found as this one's."""
        self._files |= files
        self._tensors |= tensors

    def close(self) -> None:
        """Leave what was found of the files."""
        FileDigests(files=self._files, weights_digest=digest_of_tensors(self._tensors)).leave(self._directory)


def file_names(stem: str, count: int) -> list[str]:
    """Of so many files of tensors."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(directory: Path, stem: str, planned: Sequence[Sequence[TensorHeader]]) -> None:
    """Write which file each tensor is in; nothing where there is one file."""
    if len(planned) == 1:
        return
    names = file_names(stem, len(planned))
    weight_map = {header.name: name for name, headers in zip(names, planned, strict=True) for header in headers}
    total = sum(header.bytes for headers in planned for header in headers)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def rewrite(
    sources: Iterable[Path],
    target: Path,
    change: Callable[[str, torch.Tensor], torch.Tensor],
    floating: torch.dtype | None = None,
) -> None:
    """Write each file's tensors to a file of the same name in another directory, changed one by one.

    Args:
        floating: the type that `change` gives to tensors of floating-point numbers, where it gives them another.
    """
    import torch
    from safetensors import safe_open

    types = {short: getattr(torch, name) for name, short in SAFETENSORS_NAMES.items()}
    writer = TensorWriter(target)
    for path in sources:
        with safe_open(path, "pt", device="cpu") as file:
            headers = []
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                dtype = types[part.get_dtype()]
                dtype = floating if floating is not None and dtype.is_floating_point else dtype
                headers.append(TensorHeader(name, dtype, tuple(part.get_shape())))
            (ordered,) = shards(headers, limit=2**63)
            changed = ((one.name, change(one.name, file.get_tensor(one.name))) for one in ordered)
            writer.write(path.name, ordered, changed)
    writer.close()


def retype(source: Path, target: Path, dtype: str) -> None:
    """Write the directory's weights, and its JSON files, to another, empty one, in another number format."""
    import torch

    wanted = getattr(torch, dtype)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wanted) if tensor.is_floating_point() else tensor

    rewrite(weight_files(source), target, change, wanted)
    copy_side_files(source, target)


def _taken(tensors: Iterator[tuple[str, torch.Tensor]], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    for _ in range(count):
        yield next(tensors)


def _header_bytes(headers: Sequence[TensorHeader]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for header in headers:
        entries[header.name] = {
            "dtype": SAFETENSORS_NAMES[_dtype(header)],
            "shape": list(header.shape),
            "data_offsets": [end, end + header.bytes],
        }
        end += header.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _dtype(header: TensorHeader) -> str:
    return str(header.dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]
