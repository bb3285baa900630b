"""A directory's files as they cross a network: names, sizes, digests.

Invariant: a file is taken only when its bytes have the digest that was announced, and its name stays inside its directory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict

from roundhouse.errors import DataError

CHUNK = 1 << 20


class TransferredFile(BaseModel):
    """One file of a directory."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """Relative, with forward slashes."""
    size: int
    sha256: str


def list_files(directory: Path) -> list[TransferredFile]:
    """All files below the directory, in order of their names."""
    return [
        TransferredFile(path=file.relative_to(directory).as_posix(), size=file.stat().st_size, sha256=digest(file))
        for file in sorted(path for path in directory.rglob("*") if path.is_file())
    ]


def digest(file: Path) -> str:
    """SHA-256 of the file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inside(directory: Path, name: str) -> Path:
    """Where a file of this name belongs.

    Raises:
        DataError: the name leads out of the directory.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or any(part in ("..", ".") for part in parts):
        raise DataError(f"The file name {name!r} leads out of its directory.")
    return directory.joinpath(*parts)


def write_checked(target: Path, chunks: Iterable[bytes], announced: TransferredFile) -> None:
    """Write a file, and keep it only when it is what was announced.

    Raises:
        DataError: size or digest differ.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    taken = hashlib.sha256()
    with partial.open("wb") as stream:
        for chunk in chunks:
            taken.update(chunk)
            stream.write(chunk)
    _adopt(partial, target, taken.hexdigest(), announced)


async def write_checked_async(target: Path, chunks: AsyncIterator[bytes], announced: TransferredFile) -> None:
    """`write_checked` for a body that arrives; it stops once more than the announced size came."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    taken, size = hashlib.sha256(), 0
    with partial.open("wb") as stream:
        async for chunk in chunks:
            size += len(chunk)
            if size > announced.size:
                break
            taken.update(chunk)
            stream.write(chunk)
    _adopt(partial, target, taken.hexdigest() if size == announced.size else "", announced)


def _adopt(partial: Path, target: Path, found: str, announced: TransferredFile) -> None:
    if found != announced.sha256:
        partial.unlink()
        raise DataError(f"{announced.path} did not arrive as it was sent: its size or digest differs.")
    os.replace(partial, target)
