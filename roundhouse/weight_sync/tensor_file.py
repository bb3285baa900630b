"""A safetensors file as its bytes: a header, and each tensor's bytes at their place.

Invariant: what is read is views of the mapped file, so a checkpoint larger than memory can be walked through tensor by tensor.
The format: 8 bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets), then the tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundhouse.errors import DataError

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

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES.get(self.dtype, 1)


class TensorFile:
    """A safetensors file, mapped, or its bytes where they are in memory already.

    Raises:
        DataError: it is none, or is cut short.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r") if content is None else np.frombuffer(content, np.uint8)
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
        return Tensor(name, entry["dtype"], tuple(entry["shape"]), self._body[begin:end])

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of their bytes."""
        for name in self._entries:
            yield self.tensor(name)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files right in a model's directory.

    Raises:
        DataError: there are none.
    """
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise DataError(f"{directory} has no safetensors files. Name a Hugging Face directory with weights.")
    return found
