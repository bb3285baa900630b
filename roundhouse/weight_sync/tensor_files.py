"""Safetensors files of a checkpoint: read as bytes of tensors, digested, and written tensor by tensor.

Reading yields views of the mapped file, or bounded parts, so a checkpoint larger than memory can be read tensor by
tensor. Two sets of files have equal digests exactly if they hold the same names with the same dtypes, shapes and bytes
(up to SHA-256 collisions); the split into files and their metadata do not matter.

Writing keeps one tensor, or a piece of one, in memory. Each byte is hashed as part of its file and, for weights, of its
tensor, in separate threads, and nothing is read back. The bytes equal those of `safetensors.torch.save_file`.
`digests.json` holds the digests (`store.directories.FileDigests`) for the upload and the next load.

    model.safetensors                                                    up to SHARD_BYTES
    model-00001-of-00003.safetensors … model.safetensors.index.json      above
    digests.json

The format: 8 bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets), then the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

from roundhouse.cpu import attribute_to_stage_of
from roundhouse.errors import DataError
from roundhouse.store import disk
from roundhouse.store.directories import DIGESTS, FileDigests
from roundhouse.store.disk import CHUNK_BYTES
from roundhouse.store.stage import DIGEST_THREADS, FileEntry

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")

INDEX = ".safetensors.index.json"

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
    """Offset of the bytes in the file."""

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES.get(self.dtype, 1)


class TensorFile:
    """A safetensors file, mapped.

    Raises:
        DataError: it is not a safetensors file, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # a fifo would wait for its writer
                raise ValueError("it is not a regular file")
            data = np.memmap(path, dtype=np.uint8, mode="r")
            (length,) = struct.unpack("<Q", bytes(data[:8]))
            self.header = bytes(data[: 8 + length])
            entries = json.loads(self.header[8:])
            if not isinstance(entries, dict):
                raise TypeError("its header is not an object")
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                _refuse_malformed(name, entry)
            self._entries = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
            end = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        except (OSError, ValueError, TypeError, LookupError, struct.error, RecursionError) as error:
            raise DataError(f"{path} is not a safetensors file: {error}. Point to a complete checkpoint.") from None
        self._body = data[8 + length :]
        if end != len(self._body):
            raise DataError(
                f"{path} is truncated or longer than its header allows: {len(self._body)} bytes of tensors, the header "
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


def _refuse_malformed(name: str, entry: Any) -> None:
    """Raises:
    ValueError: an entry of a header lacks dtype, shape or data_offsets, or has them in another form.
    """
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise ValueError(f"its header has no dtype, shape and data_offsets for {name[:200]!r}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"its header has the data_offsets {offsets[:3]} for {name[:200]!r}")


def _are_sizes(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def weight_files(directory: Path, stem: str = "model") -> list[Path]:
    """Return the safetensors files of a Hugging Face directory: those of its index, if it has one.

    Args:
        stem: of the index's name.

    Raises:
        DataError: they are missing, or the index names a file that is missing or outside of the directory.
    """
    index = directory / f"{stem}{INDEX}"
    if not index.is_file():
        if not (present := sorted(path for path in directory.glob("*.safetensors") if path.is_file())):
            raise DataError(f"{directory} has no safetensors files. Name a Hugging Face directory with weights.")
        return present
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if other := [name for name in names if not isinstance(name, str)]:
            raise ValueError(f"{other[0]!r} is not a file name")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DataError(f"{index} has no readable weight_map: {error!r}. Save or copy the model again.") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise DataError(f"{index} names {outside[0][:200]!r}, which lies outside of its directory.")
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise DataError(f"{directory} lacks {missing[0]}, which its index names. The weights are incomplete.")
    return [directory / name for name in names]


def iterate(directory: Path) -> Generator[tuple[str, torch.Tensor]]:
    """Every tensor of the directory by its name, on the CPU."""
    from safetensors import safe_open

    for path in weight_files(directory):
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def digest_of(directory: Path) -> str:
    """Return `digest_of_tensors` of a Hugging Face directory: the writer's record if the files are unchanged, else
    computed."""
    return FileDigests.beside(directory).weights(directory) or digest_of_tensors(
        tensor_digests(weight_files(directory))
    )


def tensor_digests(files: Iterable[Path], threads: int = DIGEST_THREADS) -> dict[str, str]:
    """Return `<dtype> <shape> <SHA-256 of the bytes>` of every tensor, by its name.

    Raises:
        DataError: a file is not a safetensors file, or is truncated.
    """

    def digest(item: tuple[Path, Tensor]) -> tuple[str, str]:
        path, tensor = item
        taken, left = hashlib.sha256(), len(tensor.data)
        with path.open("rb", buffering=0) as stream:  # mapped pages count as this process.s memory
            stream.seek(tensor.begin)
            while left and (chunk := stream.read(min(left, CHUNK_BYTES))):
                taken.update(chunk)
                left -= len(chunk)
        return tensor.name, tensor_digest(tensor.dtype, tensor.shape, taken.hexdigest())

    every = ((path, tensor) for path in files for tensor in TensorFile(path).tensors())
    return dict(parallel_map(threads, digest, every))


def tensor_digest(dtype: str, shape: Iterable[int], sha256: str) -> str:
    """Return one tensor's entry in the digest of a checkpoint.

    Args:
        dtype: by the name that safetensors has for it.
    """
    return f"{dtype} {'x'.join(map(str, shape))} {sha256}"


def torch_digest(name: str, tensor: torch.Tensor) -> tuple[str, str]:
    """Return a tensor's name and its entry as in `tensor_digests`."""
    taken = TorchDigest(tensor.dtype)
    taken.update(tensor)
    return name, taken.of_shape(tensor.shape)


class TorchDigest:
    """Compute the `tensor_digests` entry of a tensor that arrives in pieces, its rows in order.

    Args:
        dtype: that pieces are converted to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._taken = dtype, hashlib.sha256()

    def update(self, piece: torch.Tensor) -> None:
        import torch

        data = piece.detach().cpu().to(self._dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
        self._taken.update(memoryview(data))  # type: ignore[arg-type]

    def of_shape(self, shape: Iterable[int]) -> str:
        """The digest, of the whole tensor's shape."""
        dtype = SAFETENSORS_NAMES[str(self._dtype).removeprefix("torch.")]
        return tensor_digest(dtype, shape, self._taken.hexdigest())


def digest_of_tensors(digests: dict[str, str]) -> str:
    """One digest for all of them: `sha256:…`."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name]}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def needs_retyping(directory: Path, dtype: str) -> bool:
    """Return whether a tensor of the directory has another floating-point type."""
    type_name = SAFETENSORS_NAMES[dtype]
    return any(
        tensor.dtype in _FLOATING and tensor.dtype != type_name
        for path in weight_files(directory)
        for tensor in TensorFile(path).tensors()
    )


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the files that an engine needs apart from the weights: the JSON files except the manifest."""
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


SHARD_BYTES = 2 * 2**30
"""A file of tensors takes no more, but for a tensor that alone is larger: readers hold a file's pages until they are done."""
_CONCURRENT_BYTES = 2**20
"""From this size on a tensor is hashed by other threads while it is written; below, handing it over costs as much."""


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
    groups: list[list[TensorHeader]] = [[]]
    size = 0
    for header in headers:
        if groups[-1] and size + header.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(header)
        size += header.bytes
    return [sorted(shard, key=lambda one: (-one.dtype.itemsize, one.name)) for shard in groups]


class TensorWriter:
    """Writes the files of one directory; leave it by `close`."""

    def __init__(self, directory: Path, *, weights: bool = True) -> None:
        """
        Args:
            weights: take the digest of the tensors, which engines prove; of a trainer's state nobody asks for it.
        """
        self._directory = directory
        self._weights = weights
        self._files: dict[str, FileEntry] = {}
        self._tensors: dict[str, str] = {}

    def write(self, name: str, headers: Sequence[TensorHeader], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a file.

        Args:
            headers: in the order of the tensors.
            tensors: each whole, or in pieces: its rows in order, under its name. Surplus items are not consumed.
        """
        import torch

        path, whole, size, own_thread = self._directory / name, hashlib.sha256(), 0, threading.get_ident()
        if path.is_file():  # the data may be views of this mapped file, which stays alive for them
            path.unlink()

        def hash_on(digest: hashlib._Hash, data: bytes | memoryview) -> None:
            with attribute_to_stage_of(own_thread):
                digest.update(data)

        with disk.writing(path) as stream, ThreadPoolExecutor(2, thread_name_prefix="hash") as pool:

            def put(data: bytes | memoryview, *digests: hashlib._Hash) -> None:
                nonlocal size
                if len(data) < _CONCURRENT_BYTES:
                    for digest in digests:
                        digest.update(data)
                    stream.write(data)
                else:
                    hashing = [pool.submit(hash_on, digest, data) for digest in digests]
                    stream.write(data)
                    disk.begin_write_back(stream.fileno(), size, len(data))
                    for one in hashing:
                        one.result()
                size += len(data)

            put(_header_bytes(headers), whole)
            source = iter(tensors)
            for header in headers:
                own = hashlib.sha256()
                digests = (whole, own) if self._weights else (whole,)
                for piece in _pieces(header, source):
                    flat = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                    put(memoryview(flat.numpy()), *digests)  # type: ignore[arg-type]
                if self._weights:
                    digest = tensor_digest(SAFETENSORS_NAMES[_dtype(header)], header.shape, own.hexdigest())
                    self._tensors[header.name] = digest
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
            self.write(name, headers, tensors)
        write_index(self._directory, stem, planned)

    def found(self) -> tuple[dict[str, FileEntry], dict[str, str]]:
        """The files written so far, and of weights the digest of each tensor in them."""
        return self._files, self._tensors

    def add(self, files: dict[str, FileEntry], tensors: dict[str, str]) -> None:
        """Take what another writer of the directory found as this one's."""
        self._files |= files
        self._tensors |= tensors

    def close(self) -> None:
        """Write the digests of the files."""
        digest = digest_of_tensors(self._tensors) if self._weights else None
        FileDigests(files=self._files, weights_digest=digest).leave(self._directory)


def _pieces(header: TensorHeader, source: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """The next pieces, up to the tensor's last row.

    Raises:
        ValueError: they are not the announced tensor's.
    """
    rows, row = header.shape[:1] or (1,), header.shape[1:]
    left = rows[0]
    for came, piece in source:
        left -= (tuple(piece.shape[:1]) or (1,))[0]
        if (came, piece.dtype, tuple(piece.shape[1:])) != (header.name, header.dtype, row) or left < 0:
            raise ValueError(f"{came} came where {header} was announced.")
        yield piece
        if left == 0:
            return
    raise ValueError(f"The tensors ended where {header} was announced.")


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of so many files of tensors."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(directory: Path, stem: str, planned: Sequence[Sequence[TensorHeader]]) -> None:
    """Write the index from tensors to files; nothing for a single file. Delete files of an earlier save with another
    number of files, because readers would load them."""
    names, index_file = file_names(stem, len(planned)), directory / f"{stem}{INDEX}"
    for path in directory.glob(f"{stem}*.safetensors"):
        if path.name not in names and re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.safetensors", path.name):
            path.unlink()
    if len(planned) == 1:
        index_file.unlink(missing_ok=True)
        return
    weight_map = {header.name: name for name, headers in zip(names, planned, strict=True) for header in headers}
    total = sum(header.bytes for headers in planned for header in headers)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    index_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def rewrite(
    sources: Iterable[Path],
    target: Path,
    change: Callable[[str, torch.Tensor], torch.Tensor],
    floating: torch.dtype | None = None,
) -> None:
    """Write each file's tensors to a file of the same name in another directory, changed one by one.

    Args:
        floating: type that `change` gives to floating-point tensors, if it differs.
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

    torch_dtype = getattr(torch, dtype)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch_dtype) if tensor.is_floating_point() else tensor

    rewrite(weight_files(source), target, change, torch_dtype)
    copy_side_files(source, target)


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
