"""Checkpoint files by their digest, on the server's disk.

Invariant: what lies under a digest has that digest. A checkpoint that the service wrote itself, and the model that it was
started with, are never sent to it again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from roundhouse.errors import DataError
from roundhouse.training.service.files import TransferredFile, inside, list_files, write_checked, write_checked_async


class Shelf:
    """Files in a directory of the server's own; `model` is read where it lies."""

    def __init__(self, directory: Path, model: Path | None = None) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        files = list_files(model) if model is not None else []
        self._model = {file.sha256: inside(model, file.path) for file in files if model is not None}

    def find(self, sha256: str) -> Path | None:
        """Where the file lies, if it is here."""
        path = self._model.get(sha256) or self._path(sha256)
        return path if path.is_file() else None

    def missing(self, files: Iterable[TransferredFile]) -> list[str]:
        """Digests that are not here."""
        return sorted({file.sha256 for file in files if self.find(file.sha256) is None})

    async def receive(self, sha256: str, size: int, chunks: AsyncIterator[bytes]) -> None:
        """Take a file that arrives."""
        announced = TransferredFile(path=sha256, size=size, sha256=sha256)
        await write_checked_async(self._path(sha256), chunks, announced)

    def put(self, sha256: str, data: bytes) -> None:
        """Take a file that is here whole."""
        announced = TransferredFile(path=sha256, size=len(data), sha256=sha256)
        write_checked(self._path(sha256), [data], announced)

    def lay_out(self, files: Iterable[TransferredFile], target: Path) -> None:
        """Build a directory of these files; they are links where the disk allows it.

        Raises:
            DataError: a file is not here.
        """
        target.mkdir(parents=True)
        for file in files:
            held, placed = self.find(file.sha256), inside(target, file.path)
            if held is None:
                raise DataError(f"{file.path} ({file.sha256[:12]}) was not sent before load_checkpoint.")
            placed.parent.mkdir(parents=True, exist_ok=True)
            _link(held, placed)

    def keep_only(self, directory: Path | None) -> list[TransferredFile]:
        """Drop everything but the model and the files of this directory, which are taken in; return those."""
        files = list_files(directory) if directory is not None else []
        for file in files:
            assert directory is not None
            if self.find(file.sha256) is None:
                _link(directory / file.path, self._path(file.sha256))
        kept = {file.sha256 for file in files}
        for path in self._directory.iterdir():
            if path.name not in kept:
                path.unlink()
        return files

    def _path(self, sha256: str) -> Path:
        if len(sha256) != 64 or not sha256.isalnum() or not sha256.isascii():
            raise DataError(f"{sha256[:80]!r} is no SHA-256 digest.")
        return self._directory / sha256


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
