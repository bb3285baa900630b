"""Tensors of a model or an optimizer on their way into a checkpoint, and out of it, one at a time.

Invariant: every file is written by one rank, which is sent the tensors of its files piece by piece, from the ranks that have
the rows, and writes one piece while the next is on its way; no rank holds more than three pieces in addition to its own part
(`parallel.row_pieces`; whole tensors of experts, adapted layers, and what tensor parallelism splits). All ranks go through the
tensors in the same order, and none returns before all files are whole, or raises without all raising.

    rank 0   model-00001-of-00002.safetensors   index, digests.json, side files
    rank 1   model-00002-of-00002.safetensors

Ranks of other machines than the leading one's write nothing: they may not see its directory.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import safe_open

from roundhouse.cpu import attribute_to_stage_of
from roundhouse.errors import InfraError
from roundhouse.training.parallel import Ranks, row_pieces
from roundhouse.weight_sync.tensor_files import (
    INDEX,
    SHARD_BYTES,
    TensorFile,
    TensorHeader,
    TensorWriter,
    file_names,
    shards,
    weight_files,
    write_index,
)

FILE_BYTES = 4 * 2**20
"""Below this much for each rank, the leading rank writes one file."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that is to be saved."""

    shape: torch.Size
    """Shape of the whole."""
    dtype: torch.dtype
    pieces: Callable[[Ranks, int], Iterable[torch.Tensor]]
    """Its rows in order, on the rank of this number; nothing on the others. All take part."""
    on_leader: bool = False
    """Whether only the leading rank has it, whole."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        return cls(tensor.shape, tensor.dtype, lambda ranks, owner: row_pieces(tensor, ranks, owner))

    @classmethod
    def by_whole(
        cls, shape: torch.Size, dtype: torch.dtype, whole: Callable[[Ranks, int], torch.Tensor | None]
    ) -> SavedTensor:
        """Describe a tensor that `whole` makes in one piece on the numbered rank, None on the others."""

        def pieces(ranks: Ranks, owner: int) -> Iterator[torch.Tensor]:
            if (tensor := whole(ranks, owner)) is not None:
                yield tensor

        return cls(shape, dtype, pieces)


SavedTensors = dict[str, SavedTensor]


def save_tensors(tensors: SavedTensors, directory: Path, stem: str, ranks: Ranks, *, weights: bool = True) -> None:
    """Write them to `<stem>.safetensors`, or to numbered files and an index, each file by one rank.

    Args:
        weights: see `TensorWriter`.

    Raises:
        InfraError: another rank could not write; this rank's own error is raised unchanged.
    """
    headers = [TensorHeader(name, saved.dtype, tuple(saved.shape)) for name, saved in tensors.items()]
    writers = 1 if any(saved.on_leader for saved in tensors.values()) else min(ranks.size, ranks.here)
    planned = _planned(headers, writers)
    names = file_names(stem, len(planned))
    own = {name: shard for i, (name, shard) in enumerate(zip(names, planned, strict=True)) if i % writers == ranks.rank}
    thread = _WriterThread(TensorWriter(directory, weights=weights), directory, own)
    by_owner = [[header.name for shard in planned[rank::writers] for header in shard] for rank in range(writers)]
    with freed_at_once():
        try:
            for turn in zip_longest(*by_owner):
                for owner, name in enumerate(turn):
                    if name is not None:
                        for piece in tensors[name].pieces(ranks, owner):
                            thread.put(name, piece.cpu())
        finally:
            thread.end()
    files, digests = thread.writer.found()
    every = ranks.gather((files, digests, None if thread.error is None else repr(thread.error)))
    if thread.error is not None:
        raise thread.error
    for rank, (_, _, error) in enumerate(every):
        if error is not None:
            raise InfraError(f"Rank {rank} of {ranks.size} could not write its part of {directory}: {error}")
    if ranks.leads:
        for files, digests, _ in every[1:]:
            thread.writer.add(files, digests)
        write_index(directory, stem, planned)
        thread.writer.close()


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Return freed memory to the system, as far as the C library allows.

    glibc learns to keep blocks of up to 32 MiB for the next allocation. Between tensors that stay, blocks of converted
    or sent ones would take as much memory as a rank's part. After the block it keeps those below 256 KiB: larger ones
    would leave gaps in the heap, which cost 550 of 1,400 MiB on each of four ranks with 43 M parameters. Mapping them
    anew takes some 3 to 8 % more CPU.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, 2**17)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 2**18)
        set_option(_TRIM_THRESHOLD, 2**18)


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""In malloc.h: from which size a block is mapped by itself, and how much of the heap's end stays when it is freed."""


def _planned(headers: list[TensorHeader], writers: int) -> list[list[TensorHeader]]:
    """The tensors of each file: as many files for each writer, of about the same size."""
    total = sum(header.bytes for header in headers)
    if writers == 1 or total < writers * FILE_BYTES:
        return shards(headers, SHARD_BYTES)
    count = writers * -(-total // (writers * SHARD_BYTES))
    files: list[list[TensorHeader]] = [[] for _ in range(count)]
    begin = 0
    for header in headers:
        files[min((2 * begin + header.bytes) * count // (2 * total), count - 1)].append(header)
        begin += header.bytes
    return [shards(file, total)[0] for file in files if file]


class _WriterThread:
    """Writes files while the pieces of their tensors come; after an error it takes the rest and drops them."""

    def __init__(self, writer: TensorWriter, directory: Path, files: dict[str, list[TensorHeader]]) -> None:
        self.writer = writer
        self.error: BaseException | None = None
        self._coming: queue.Queue[tuple[str, torch.Tensor] | None] = queue.Queue(maxsize=1)
        self._for = threading.get_ident()
        self._thread = threading.Thread(target=self._write, args=(directory, files), daemon=True)
        self._thread.start()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._coming.put((name, tensor))

    def end(self) -> None:
        """Return when everything is written, or has failed."""
        self._coming.put(None)
        self._thread.join()

    def _write(self, directory: Path, files: dict[str, list[TensorHeader]]) -> None:
        came = iter(self._coming.get, None)
        with attribute_to_stage_of(self._for):
            try:
                if files:
                    directory.mkdir(parents=True, exist_ok=True)
                for name, headers in files.items():
                    self.writer.write(name, headers, came)
            except BaseException as error:  # noqa: BLE001 - raised by `save_tensors`, when all ranks know
                self.error = error
            for _ in came:
                pass


def saved_tensors(directory: Path, stem: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that `save_tensors` wrote, by its name; the caller holds one at a time.

    Raises:
        OSError, SafetensorError: a file is missing or damaged.
        DataError: the index is.
    """
    for path in files_of(directory, stem):
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def files_of(directory: Path, stem: str) -> list[Path]:
    """Return the files that `save_tensors` wrote.

    Raises:
        DataError: the index is damaged, or names a missing file.
    """
    indexed = (directory / f"{stem}{INDEX}").is_file()
    return weight_files(directory, stem) if indexed else [directory / f"{stem}.safetensors"]


def matrix_types(files: Iterable[Path]) -> set[str]:
    """Return the number formats, in safetensors' names, of all tensors in these files except vectors.

    Raises:
        DataError: a file is missing or damaged.
    """
    tensors = (tensor for path in files for tensor in TensorFile(path).tensors())
    return {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
