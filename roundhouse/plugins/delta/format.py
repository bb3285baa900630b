"""Format of a delta: its index `delta.json`, the parts that the index points into, and the encoding of a piece.

Invariants: a delta is complete exactly if its `delta.json` exists; it is written last, once, and names the digest of
every part and of every tensor before and after. `decode(*encode(old, new, n), old, n)` is new for all bytes.

    same         nothing
    sparse       the distances between changed elements, and their steps
    difference   the step of every element
    whole        the new bytes

A step is new - old as integers of the element's size, modulo 2^bits, with its sign in the lowest bit: one unit up or
down is 2 or 1. An optimizer's small step moves most bfloat16 numbers by no unit and most others by one, so steps
compress better than an exclusive or, in which a carry changes many bits. Numbers are stored in byte planes (b0 b0 … b1
b1 …), so that the high bytes, nearly all zero, compress to nothing; then zstd.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.errors import DataError
from roundhouse.store.location import Location

DELTA = "delta.json"
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SPARSE_BELOW = 0.3
"""Share of changed elements below which their places cost less than a step for each."""
LEVEL = 1
"""zstd level. Measured on bfloat16 steps: level 9 saves 0 to 10 % of the bytes for 4 times the time."""


class Codec(StrEnum):
    SAME = "same"
    SPARSE = "sparse"
    DIFFERENCE = "difference"
    WHOLE = "whole"


class _DeltaRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(_DeltaRecord):
    """A stretch of a tensor, or of a file without a base."""

    codec: Codec
    size: int
    """Bytes that it represents."""
    part: int
    offset: int
    length: int
    """Bytes in its part."""


class TensorDelta(_DeltaRecord):
    name: str
    dtype: str
    element_bytes: int
    before: str | None
    """SHA-256 of the base's bytes; None: the base does not have the tensor."""
    after: str
    pieces: list[Piece]


class WeightFileDelta(_DeltaRecord):
    """A safetensors file: its header, then its tensors in order."""

    name: str
    header: list[Piece]
    tensors: list[TensorDelta]


class SideFile(_DeltaRecord):
    """A file next to the weights, as it is in the base or whole."""

    name: str
    sha256: str
    pieces: list[Piece] | None
    """None: it is the base's."""


class DeltaPart(_DeltaRecord):
    size: int
    sha256: str


class Delta(_DeltaRecord):
    """The content of `delta.json`."""

    schema_version: Literal[1] = 1
    weights: list[WeightFileDelta]
    side_files: list[SideFile]
    parts: list[DeltaPart]

    @property
    def full_bytes(self) -> int:
        """Bytes of the new checkpoint's tensors."""
        return sum(piece.size for file in self.weights for tensor in file.tensors for piece in tensor.pieces)

    @property
    def delta_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)


def part_name(number: int) -> str:
    """The object that holds a part."""
    return f"delta-{number:05d}.bin"


def read_delta(place: Location) -> Delta:
    """Read the index of a delta.

    Raises:
        StoreError: the delta is missing. DataError: it cannot be read.
    """
    try:
        return Delta.model_validate_json(place.read(DELTA))
    except ValidationError as error:
        raise DataError(f"{place.uri}/{DELTA} cannot be read: {error}. Fetch the whole checkpoint.") from None


def encode(old: np.ndarray, new: np.ndarray, element_bytes: int) -> tuple[Codec, bytes]:
    """The change from `old` to `new`, both [n] uint8 with n a multiple of `element_bytes`, in the form that is smallest."""
    before, after = _elements(old, element_bytes), _elements(new, element_bytes)
    changed = before != after
    count = int(np.count_nonzero(changed))
    if count == 0:
        return Codec.SAME, b""
    if count < SPARSE_BELOW * len(before):
        places = np.flatnonzero(changed)
        gaps = np.diff(places, prepend=0).astype(np.uint32)
        steps = _steps(before[places], after[places])
        return Codec.SPARSE, count.to_bytes(8, "little") + _compress(np.concatenate([_planes(gaps), _planes(steps)]))
    data = _compress(_planes(_steps(before, after)))
    if len(data) > 0.6 * len(new) and len(whole := encode_whole(new)) <= len(data):
        return Codec.WHOLE, whole
    return Codec.DIFFERENCE, data


def encode_whole(new: np.ndarray) -> bytes:
    """Encode bytes without a base."""
    return _compress(np.ascontiguousarray(new))


def decode(codec: Codec, data: bytes, old: np.ndarray, element_bytes: int) -> np.ndarray:
    """The new bytes [n] uint8.

    Raises:
        ValueError, OSError: the data is damaged.
    """
    before = _elements(old, element_bytes)
    if codec is Codec.SAME:
        return before.view(np.uint8)
    if codec is Codec.WHOLE:
        return decode_whole(data, len(old))
    if codec is Codec.SPARSE:
        count = int.from_bytes(data[:8], "little")
        if count > len(before):
            raise ValueError(f"{count} of {len(before)} elements are listed as changed")
        planes = _expand(data[8:], count * (4 + element_bytes))
        places = np.cumsum(_joined(planes[: 4 * count], 4), dtype=np.int64)
        if count and places[-1] >= len(before):
            raise ValueError(f"element {places[-1]} of {len(before)} is listed as changed")
        after = before.copy()
        after[places] = _stepped(before[places], _joined(planes[4 * count :], element_bytes))
        return after.view(np.uint8)
    return _stepped(before, _joined(_expand(data, len(old)), element_bytes)).view(np.uint8)


def decode_whole(data: bytes, size: int) -> np.ndarray:
    """[size] uint8."""
    return _expand(data, size)


def _steps(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    step = (after - before).view(np.dtype(f"i{before.itemsize}"))
    return ((step << 1) ^ (step >> (8 * before.itemsize - 1))).view(before.dtype)


def _stepped(before: np.ndarray, steps: np.ndarray) -> np.ndarray:
    one = steps.dtype.type(1)
    return before + ((steps >> one) ^ (~(steps & one) + one))


def _elements(data: np.ndarray, element_bytes: int) -> np.ndarray:
    whole = (
        data if data.ctypes.data % element_bytes == 0 else data.copy()
    )  # views have to lie on their elements' bounds
    return np.ascontiguousarray(whole).view(_UNSIGNED[element_bytes])


def _planes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def _joined(planes: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(planes.reshape(size, -1).T).reshape(-1).view(_UNSIGNED[size])


def _compress(data: np.ndarray) -> bytes:
    return pa.Codec("zstd", compression_level=LEVEL).compress(memoryview(data), asbytes=True)  # type: ignore[arg-type]


def _expand(data: bytes, size: int) -> np.ndarray:
    expanded = pa.Codec("zstd").decompress(data, decompressed_size=size, asbytes=True) if size else b""
    if len(expanded) != size:
        raise ValueError(f"{len(expanded)} bytes came out, {size} were put in")
    return np.frombuffer(expanded, dtype=np.uint8)
