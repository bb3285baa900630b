"""What a delta is made of: its index, `delta.json`, and the parts that the index points into.

Invariant: a delta is complete exactly when its `delta.json` exists. It is written last, once, and names the digest of every
part and of every tensor before and after.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.errors import DataError
from roundhouse.store.location import Location
from roundhouse.weight_sync.codec import Codec

DELTA = "delta.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(_Record):
    """A stretch of a tensor, or of a file without a base."""

    codec: Codec
    size: int
    """Bytes that it stands for."""
    part: int
    offset: int
    length: int
    """Bytes in its part."""


class TensorDelta(_Record):
    name: str
    dtype: str
    element_bytes: int
    before: str | None
    """SHA-256 of the base's bytes; None: the base has no such tensor."""
    after: str
    pieces: list[Piece]


class WeightFileDelta(_Record):
    """A safetensors file: its header, then its tensors in order."""

    name: str
    header: list[Piece]
    tensors: list[TensorDelta]


class SideFile(_Record):
    """A file beside the weights, as it is in the base or whole."""

    name: str
    sha256: str
    pieces: list[Piece] | None
    """None: it is the base's."""


class Part(_Record):
    size: int
    sha256: str


class Delta(_Record):
    """The content of `delta.json`."""

    schema_version: Literal[1] = 1
    weights: list[WeightFileDelta]
    side_files: list[SideFile]
    parts: list[Part]

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
    """What a delta is made of.

    Raises:
        StoreError: there is none. DataError: it cannot be read.
    """
    try:
        return Delta.model_validate_json(place.read(DELTA))
    except ValidationError as error:
        raise DataError(f"{place.uri}/{DELTA} cannot be read: {error}. Fetch the whole checkpoint.") from None
