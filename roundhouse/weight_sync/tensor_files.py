"""The safetensors files of a checkpoint: their tensors as bytes, and the digest of them.

Invariants: what is read is views of the mapped file, or a bounded part of it at a time, so a checkpoint larger than memory can
be walked through tensor by tensor. Two sets of files have one digest exactly when they hold the same names with the same
dtypes, shapes and bytes (as far as SHA-256 tells); how the tensors are spread over files, and what metadata the files carry,
does not matter.

The format: 8 bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets), then the tensors.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from roundhouse.errors import DataError
from roundhouse.store.directories import DIGESTS, FileDigests
from roundhouse.store.disk import CHUNK_BYTES

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")

INDEX = ".safetensors.index.json"
DIGEST_THREADS = 2

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""By torch's names."""
_FLOATING = frozenset({"F64", "F32", "BF16", "F16"})
ELEMENT_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
"""Bytes of an element; every other dtype is treated as bytes."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's description and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    """[bytes] uint8, a view of the file."""
    begin: int = 0
    """Of the bytes in the file."""

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES.get(self.dtype, 1)


class TensorFile:
    """A safetensors file, mapped.

    Raises:
        DataError: it is none, or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
            (length,) = struct.unpack("<Q", bytes(data[:8]))
            self.header = bytes(data[: 8 + length])
            entries = json.loads(self.header[8:])
            if not isinstance(entries, dict):
                raise TypeError("its header is no object")
            entries.pop("__metadata__", None)
            self._entries = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
            end = max((int(entry["data_offsets"][1]) for entry in self._entries.values()), default=0)
        except (OSError, ValueError, TypeError, LookupError, struct.error) as error:
            raise DataError(f"{path} is no safetensors file: {error}. Point to a complete checkpoint.") from None
        self._body = data[8 + length :]
        if end != len(self._body):
            raise DataError(
                f"{path} is cut short or has more than its header says: {len(self._body)} bytes of tensors, the header "
                f"names {end}. Point to a complete checkpoint."
            )

    def names(self) -> list[str]:
        """Names in the order of the tensors' bytes."""
        return list(self._entries)

    def tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        at = len(self.header) + begin
        return Tensor(name, entry["dtype"], tuple(entry["shape"]), self._body[begin:end], at)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of their bytes."""
        for name in self._entries:
            yield self.tensor(name)


def weight_files(directory: Path, stem: str = "model") -> list[Path]:
    """The safetensors files of a Hugging Face directory: those that its index names, where it has one.

    Args:
        stem: of the index's name.

    Raises:
        DataError: there are none, or the index names one that is missing or outside of the directory.
    """
    index = directory / f"{stem}{INDEX}"
    if not index.is_file():
        if not (present := sorted(directory.glob("*.safetensors"))):
            raise DataError(f"{directory} has no safetensors files. Name a Hugging Face directory with weights.")
        return present
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"{index} has no readable weight_map: {error!r}. Save or copy the model again.") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise DataError(f"{index} names {outside[0][:200]!r}, which lies outside of its directory.")
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise DataError(f"{directory} lacks {missing[0]}, which its index names. The weights are incomplete.")
    return [directory / name for name in names]


def iterate(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the directory by its name, on the CPU."""
    from safetensors import safe_open

    for path in weight_files(directory):
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def digest_of(directory: Path) -> str:
    """`digest_of_tensors` of all tensors of a Hugging Face directory; that which their writer left, while they are as it left
    them."""
    return FileDigests.beside(directory).weights(directory) or digest_of_tensors(
        tensor_digests(weight_files(directory))
    )


def tensor_digests(files: Iterable[Path], threads: int = DIGEST_THREADS) -> dict[str, str]:
    """`<dtype> <shape> <SHA-256 of the bytes>` of every tensor, by its name.

    Raises:
        DataError: a file is no safetensors file, or is cut short.
    """

    def digest(item: tuple[Path, Tensor]) -> tuple[str, str]:
        path, tensor = item
        taken, left = hashlib.sha256(), len(tensor.data)
        with path.open("rb", buffering=0) as stream:  # not by the map, whose pages would count as this process's memory
            stream.seek(tensor.begin)
            while left and (chunk := stream.read(min(left, CHUNK_BYTES))):
                taken.update(chunk)
                left -= len(chunk)
        return tensor.name, tensor_digest(tensor.dtype, tensor.shape, taken.hexdigest())

    every = ((path, tensor) for path in files for tensor in TensorFile(path).tensors())
    return dict(parallel_map(threads, digest, every))


def tensor_digest(dtype: str, shape: Iterable[int], sha256: str) -> str:
    """What the digest of a checkpoint holds of one tensor.

    Args:
        dtype: by the name that safetensors has for it.
    """
    return f"{dtype} {'x'.join(map(str, shape))} {sha256}"


def torch_digest(name: str, tensor: torch.Tensor) -> tuple[str, str]:
    """A tensor's name, and what `tensor_digests` would say of it in a file."""
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = SAFETENSORS_NAMES[str(tensor.dtype).removeprefix("torch.")]
    return name, tensor_digest(dtype, tensor.shape, hashlib.sha256(memoryview(data)).hexdigest())  # type: ignore[arg-type]


def digest_of_tensors(digests: dict[str, str]) -> str:
    """One digest for all of them: `sha256:…`."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name]}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def needs_retyping(directory: Path, dtype: str) -> bool:
    """Whether a tensor of the directory is of another floating-point type."""
    wanted = SAFETENSORS_NAMES[dtype]
    return any(
        tensor.dtype in _FLOATING and tensor.dtype != wanted
        for path in weight_files(directory)
        for tensor in TensorFile(path).tensors()
    )


def copy_side_files(source: Path, target: Path) -> None:
    """What an engine asks of a directory of weights beside the weights: its JSON files, but no manifest."""
    for path in sorted(source.glob("*.json")):
        if path.name not in ("manifest.json", DIGESTS) and not path.name.startswith("attempt-"):
            shutil.copyfile(path, target / path.name)


def parallel_map(threads: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`map` in a pool of threads, for work that releases the GIL (numpy, zstd, SHA-256). Results keep the order of the items;
    at most `threads` + 1 items are taken before their results are."""
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[R]] = deque()
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
