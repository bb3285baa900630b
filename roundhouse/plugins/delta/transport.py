"""The transport `delta`: the change between two checkpoints, exact, compressed and checksummed.

    <delta>/delta-00000.bin …    the changes, piece after piece
    <delta>/delta.json           the pieces of each tensor, with digests

Invariants: applied to its base checkpoint, a delta gives the new one's files bit for bit, proved tensor by tensor
(SHA-256). Applied to anything else it is refused, and nothing appears under the target's name. Memory is bounded by a
few times `PIECE_BYTES` and one part, for any model size.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from roundhouse.errors import DataError, StoreError
from roundhouse.plugins.delta.format import (
    DELTA,
    Codec,
    Delta,
    DeltaPart,
    Piece,
    SideFile,
    TensorDelta,
    WeightFileDelta,
    decode,
    decode_whole,
    encode,
    encode_whole,
    part_name,
    read_delta,
)
from roundhouse.store import disk
from roundhouse.store.location import Location
from roundhouse.weight_sync.base import (
    FetchRequest,
    Published,
    RunCheckpoint,
    WeightSource,
    WeightTransport,
    checkpoint_source,
)
from roundhouse.weight_sync.cache import CacheEntry, entry_key
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import Tensor, TensorFile, digest_of, parallel_map, weight_files

PIECE_BYTES = 8 * 2**20
PART_BYTES = 64 * 2**20
KEPT_DELTAS = 2
_NAME = re.compile(r"(\d{6})-from-[0-9a-f]{12}-[0-9a-f]{12}")
_NOT_COPIED = re.compile(r"manifest\.json|delta\.json|attempt-\d+\.json|\..*|.*\.safetensors")


class DeltaSource(WeightSource):
    kind: str = "delta"
    base: str
    """Digest of the weights that it starts from."""
    uri: str


class DeltaTransport(WeightTransport):
    """Change since the weights that most replicas hold, in the engine's format.

    <store>/runs/<run>/deltas/000012-from-1a2b…-3c4d…/     the two newest are kept, and the one just written
    """

    Source = DeltaSource
    asks_replicas = True

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        with checkpoint.in_engine_format() as directory:
            digest = digest_of(directory)
            bases = Counter(
                (one.digest, one.weights)
                for one in replicas
                if (one.ready or one.asleep) and one.digest and one.weights
            )
            delta = None
            for (base_digest, base_uri), _ in bases.most_common(1):
                if base_digest != digest:
                    delta = _publish_delta(checkpoint, directory, digest, str(base_digest), str(base_uri))
            yield Published(digest, delta or checkpoint_source(checkpoint.dtype))

    @classmethod
    def fetch(cls, source: DeltaSource, request: FetchRequest) -> tuple[Path, CacheEntry | None]:
        current = request.current
        if current is None or current.digest != source.base:
            holds = "nothing" if current is None else current.digest
            raise DataError(f"it starts from {source.base}, this replica holds {holds}")
        if current.directory is None:
            raise DataError("it starts from weights in a file, those of this replica came without")
        base = current.directory

        def fill(partial: Path) -> None:
            apply_delta(base, Location(source.uri), partial / "whole")
            for path in (partial / "whole").iterdir():
                path.rename(partial / path.name)
            (partial / "whole").rmdir()

        entry = request.cache.entry(entry_key("delta", source.base, source.uri, request.digest), fill)
        return entry.path, entry


def _publish_delta(
    checkpoint: RunCheckpoint, directory: Path, digest: str, base_digest: str, base_uri: str
) -> DeltaSource | None:
    """None: the base's checkpoint is not there any more, or is another."""
    deltas = checkpoint.run.location / "deltas"
    name = f"{checkpoint.reference.policy_version:06d}-from-{_short(base_digest)}-{_short(digest)}"
    place = deltas / name
    with ExitStack() as stack:
        try:
            base = stack.enter_context(checkpoint.in_engine_format(base_uri))
        except (DataError, StoreError, OSError):
            return None  # retention deleted it first
        if digest_of(base) != base_digest:
            return None
        if not place.exists(DELTA):
            write_delta(base, directory, place, side_files=False)
    for old in sorted(each for each in deltas.names() if _NAME.fullmatch(each))[:-KEPT_DELTAS]:
        if old != name:
            (deltas / old).delete_tree()
    return DeltaSource(dtype=checkpoint.dtype, base=base_digest, uri=place.uri)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def write_delta(base: Path, new: Path, place: Location, *, threads: int = 1, side_files: bool = True) -> Delta:
    """Write the change from one Hugging Face directory to another.

    Args:
        side_files: False omits the files next to the weights; the base that it is applied to needs none either.

    Raises:
        DataError: a directory lacks whole weights.
        StoreError: a delta exists at the place, or it cannot be written.
    """
    if place.exists(DELTA):
        raise StoreError(f"{place.uri} holds a delta already. Choose another place; a delta is never replaced.")
    base_tensors = _by_name(base)
    writer = _Parts(place)
    weights = [
        WeightFileDelta(
            name=file.path.name,
            header=[writer.add(Codec.WHOLE, len(file.header), encode_whole(_bytes(file.header)))],
            tensors=[
                _tensor_delta(tensor, base_tensors.get(tensor.name), writer, threads) for tensor in file.tensors()
            ],
        )
        for file in map(TensorFile, weight_files(new))
    ]
    beside = []
    for path in sorted(new.iterdir()) if side_files else ():
        if not path.is_file() or _NOT_COPIED.fullmatch(path.name):
            continue
        data, old = path.read_bytes(), base / path.name
        digest = hashlib.sha256(data).hexdigest()
        unchanged = old.is_file() and hashlib.sha256(old.read_bytes()).hexdigest() == digest
        pieces = None if unchanged else [writer.add(Codec.WHOLE, len(data), encode_whole(_bytes(data)))]
        beside.append(SideFile(name=path.name, sha256=digest, pieces=pieces))
    delta = Delta(weights=weights, side_files=beside, parts=writer.close())
    place.create(DELTA, delta.model_dump_json().encode())
    return delta


def apply_delta(base: Path, place: Location, target: Path, *, threads: int = 1) -> Delta:
    """Make the new directory from the base and a delta; it appears under its name only when it is whole.

    Raises:
        DataError: the delta was made from another base, or is damaged.
        StoreError: the delta is missing, or the target exists.
    """
    delta = read_delta(place)
    if target.exists():
        raise StoreError(f"{target} exists already. Name a directory that does not.")
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        reader, base_tensors = _PartReader(place, delta.parts), _by_name(base)
        for file in delta.weights:
            with disk.writing(staging / file.name) as stream:
                stream.write(_buffer(_whole(file.header, reader)))
                for piece in _tensors(file, base_tensors, reader, threads):
                    stream.write(_buffer(piece))
        for side in delta.side_files:
            data = (base / side.name).read_bytes() if side.pieces is None else bytes(_whole(side.pieces, reader))
            if hashlib.sha256(data).hexdigest() != side.sha256:
                raise DataError(f"{side.name} is not what {reader.uri} was made from. Fetch the whole checkpoint.")
            with disk.writing(staging / side.name) as stream:
                stream.write(data)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return delta


def _tensor_delta(tensor: Tensor, old: Tensor | None, writer: _Parts, threads: int) -> TensorDelta:
    comparable = old is not None and (old.dtype, len(old.data)) == (tensor.dtype, len(tensor.data))
    size = tensor.element_bytes

    spans = (slice(begin, begin + PIECE_BYTES) for begin in range(0, len(tensor.data), PIECE_BYTES))

    def encoded(span: slice) -> tuple[Codec, int, bytes]:
        data = tensor.data[span]
        if old is None or not comparable:
            return Codec.WHOLE, len(data), encode_whole(data)
        codec, change = encode(old.data[span], data, size)
        return codec, len(data), change

    pieces = [writer.add(*arguments) for arguments in parallel_map(threads, encoded, spans)]
    return TensorDelta(
        name=tensor.name,
        dtype=tensor.dtype,
        element_bytes=size,
        before=_digest(old.data) if old is not None and comparable else None,
        after=_digest(tensor.data),
        pieces=pieces,
    )


class _Parts:
    """Pieces gathered to parts of about `PART_BYTES`."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._waiting = bytearray()
        self._done: list[DeltaPart] = []

    def add(self, codec: Codec, size: int, data: bytes) -> Piece:
        if self._waiting and len(self._waiting) + len(data) > PART_BYTES:
            self._flush()
        piece = Piece(codec=codec, size=size, part=len(self._done), offset=len(self._waiting), length=len(data))
        self._waiting += data
        return piece

    def close(self) -> list[DeltaPart]:
        if self._waiting or not self._done:
            self._flush()
        return self._done

    def _flush(self) -> None:
        data = bytes(self._waiting)
        self._place.write(part_name(len(self._done)), data)
        self._done.append(DeltaPart(size=len(data), sha256=hashlib.sha256(data).hexdigest()))
        self._waiting = bytearray()


def _tensors(file: WeightFileDelta, held: dict[str, Tensor], reader: _PartReader, threads: int) -> Iterator[np.ndarray]:
    """Yield the new bytes of a file's tensors, piece after piece. A fault shows at the tensor's end at the latest."""
    for tensor in file.tensors:
        old = held.get(tensor.name) if tensor.before is not None else None
        if tensor.before is not None and (old is None or _digest(old.data) != tensor.before):
            problem = "missing" if old is None else f"{_digest(old.data)[:12]}…, not {tensor.before[:12]}…"
            raise DataError(
                f"The delta {reader.uri} does not start from these weights: {tensor.name} is {problem}. Apply it to the "
                "version it was made from, or fetch the whole checkpoint."
            )
        digest = hashlib.sha256()

        def decoded(
            item: tuple[Piece, slice, bytes], old: Tensor | None = old, size: int = tensor.element_bytes
        ) -> np.ndarray:
            piece, span, data = item
            if old is None:
                return decode_whole(data, piece.size)
            return decode(piece.codec, data, old.data[span], size)

        try:
            for data in parallel_map(threads, decoded, _with_data(tensor, reader)):
                digest.update(_buffer(data))
                yield data
        except (ValueError, OSError) as error:
            raise DataError(
                f"{tensor.name} in {reader.uri} is damaged: {error}. Fetch the whole checkpoint."
            ) from error
        if digest.hexdigest() != tensor.after:
            raise DataError(
                f"{tensor.name} came out of {reader.uri} as {digest.hexdigest()[:12]}…, wanted was {tensor.after[:12]}…. "
                "Fetch the whole checkpoint."
            )


def _with_data(tensor: TensorDelta, reader: _PartReader) -> Iterator[tuple[Piece, slice, bytes]]:
    begin = 0
    for piece in tensor.pieces:
        yield piece, slice(begin, begin + piece.size), reader.piece(piece)
        begin += piece.size


def _whole(pieces: Iterable[Piece], reader: _PartReader) -> np.ndarray:
    return np.concatenate([decode_whole(reader.piece(piece), piece.size) for piece in pieces])


class _PartReader:
    """Pieces of parts, one part in memory at a time; they come in the order in which they were written."""

    def __init__(self, place: Location, parts: list[DeltaPart]) -> None:
        self.uri = place.uri
        self._place, self._parts = place, parts
        self._number, self._data = -1, b""

    def piece(self, piece: Piece) -> bytes:
        if piece.part != self._number:
            name = part_name(piece.part)
            data = self._place.read(name)
            if hashlib.sha256(data).hexdigest() != self._parts[piece.part].sha256:
                raise DataError(f"{self.uri}/{name} is damaged. Fetch the whole checkpoint.")
            self._number, self._data = piece.part, data
        return self._data[piece.offset : piece.offset + piece.length]


def _by_name(directory: Path) -> dict[str, Tensor]:
    return {tensor.name: tensor for path in weight_files(directory) for tensor in TensorFile(path).tensors()}


def _digest(data: np.ndarray) -> str:
    return hashlib.sha256(_buffer(data)).hexdigest()


def _buffer(data: np.ndarray) -> memoryview:
    return memoryview(data)  # type: ignore[arg-type]


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)
