"""Objects of a store on a file system.

Invariants: an object appears under its name whole or not at all, also when the power goes: its bytes are on the disk before its
name is, and its name before the call returns, with the names of directories that were made for it. A name never leads out of
its directory, also not through a link.

What this rests on: rename and link are atomic, and fsync means what it says. Network file systems vary.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from roundhouse.errors import StoreError


def replace(target: Path, data: bytes) -> None:
    """Write the object, whatever was there."""
    temporary = _write_temporary(target, data)
    os.replace(temporary, target)
    _sync_directory(target.parent)


def create(target: Path, data: bytes) -> None:
    """Write an object that does not exist.

    Raises:
        FileExistsError: it does.
    """
    temporary = _write_temporary(target, data)
    try:
        os.link(temporary, target)
    finally:
        temporary.unlink()
    _sync_directory(target.parent)


def inside(root: str, name: str) -> Path:
    """The path of an object below a root.

    Raises:
        StoreError: a link on the way leads out of the root.
    """
    path, real_root = os.path.join(root, name), os.path.realpath(root)
    if os.path.commonpath((real_root, os.path.realpath(path))) != real_root:
        raise StoreError(
            f"{path} is a link that leads out of {root}. Put the file itself there; only the root may be a link."
        )
    return Path(path)


def tree(root: str) -> list[str]:
    """Names of all files below, relative, sorted. Links to directories are not followed."""
    found = []
    for folder, _, names in os.walk(root, onerror=_raised):
        relative = os.path.relpath(folder, root)
        found += [name if relative == "." else f"{relative}/{name}" for name in names]
    return sorted(found)


def delete_tree(root: str) -> None:
    """Delete a directory with everything below; nothing happens when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root)


def _raised(error: OSError) -> None:
    """A directory that went while its parent was listed holds nothing; one that cannot be read is an error."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _write_temporary(target: Path, data: bytes) -> Path:
    _make_directory(target.parent)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
