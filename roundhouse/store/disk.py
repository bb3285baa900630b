"""Objects of a store on a file system.

Invariants: an object appears under its name whole or not at all, also when the power goes: its bytes are on the disk before its
name is, and its name before the call returns, with the names of directories that were made for it. A name never leads out of
its directory, also not through a link. A temporary file that is deleted meanwhile is written again.

A file's *stamp* is its time of modification, which `settle` sets a second back: whatever is written to the file later, also
within the same tick of the kernel's clock, gives it another. So a file with the stamp of the moment in which its bytes were
hashed holds these bytes, as far as programs change them; what a failing disk changes shows when they are read.

What this rests on: rename and link are atomic, and fsync means what it says. Network file systems vary.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from roundhouse.errors import StoreError

Buffer = bytes | bytearray | memoryview
_TRIES = 5
"""Of a write whose temporary file vanishes: each is another deletion in the same moment."""
CHUNK_BYTES = 4 * 2**20
"""What of a file is in memory at a time."""
_SETTLED_NS = 1_000_000_000
_TEMPORARY = re.compile(r"(?:^|/)\.[^/]+\.[0-9a-f]{32}$")


def replace(target: Path, data: bytes) -> None:
    """Write the object, whatever was there."""
    _place(os.replace, target, data)


def create(target: Path, data: bytes) -> None:
    """Write an object that does not exist.

    Raises:
        FileExistsError: it does.
    """
    _place(os.link, target, data)


def replace_streamed(target: Path, chunks: Iterable[Buffer]) -> str:
    """Write the object as its bytes come, whatever was there; its stamp."""
    _make_directory(target.parent)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
                if len(chunk) >= CHUNK_BYTES:
                    begin_write_back(stream.fileno(), stream.tell() - len(chunk), len(chunk))
        return move(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def move(source: Path, target: Path) -> str:
    """Make a file of the same file system the object, whatever was there; its stamp.

    Raises:
        OSError: EXDEV if it is on another file system.
    """
    _make_directory(target.parent)
    mark = settle(source)
    os.replace(source, target)
    sync_directory(target.parent)
    return mark


def settle(path: Path, *, sync: bool = True) -> str:
    """Give a file that is written no more its stamp, and return it.

    Args:
        sync: put the file's bytes on the disk.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found = os.fstat(descriptor)
        os.utime(descriptor, ns=(found.st_atime_ns, found.st_mtime_ns - _SETTLED_NS))
        if sync:
            os.fsync(descriptor)
        return str(os.fstat(descriptor).st_mtime_ns)
    finally:
        os.close(descriptor)


def begin_write_back(descriptor: int, begin: int, size: int) -> None:
    """Have the kernel begin to put these bytes of a file on the disk, without waiting. Otherwise it keeps gigabytes in memory
    before it does, and whoever calls fsync waits for all of them. Nothing where the system does not offer it (Linux does)."""
    if (call := getattr(_LIBC, "sync_file_range", None)) is not None:
        call(descriptor, ctypes.c_int64(begin), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def stamp(path: Path) -> str:
    return str(path.stat().st_mtime_ns)


def chunks_of(path: Path) -> Iterator[bytes]:
    """A file's bytes, a bounded part at a time."""
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _place(put: Callable[[Path, Path], None], target: Path, data: bytes) -> None:
    """Put the bytes under the target's name, by `os.replace` or `os.link` from a temporary file."""
    for tries_left in reversed(range(_TRIES)):
        temporary = _write_temporary(target, data)
        try:
            put(temporary, target)
            break
        except FileNotFoundError:
            if not tries_left:
                raise
        finally:
            temporary.unlink(missing_ok=True)
    sync_directory(target.parent)


def is_temporary(name: str) -> bool:
    """Whether an object's name is that of a write that was not finished, or is under way."""
    return _TEMPORARY.search(name) is not None


def unchanged_since(root: str, names: Iterable[str], seconds: float) -> list[str]:
    """Those of the files that were not changed for so long, by the clock of the file system itself: its own mark of a file
    that is written now is what theirs are held against."""
    probe = _write_temporary(Path(root, "probe"), b"")
    try:
        now = probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
    old = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if now - inside(root, name).stat().st_mtime > seconds:
                old.append(name)
    return old


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

    def raised(error: OSError) -> None:
        # A directory that went while its parent was listed holds nothing; one that cannot be read is an error
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    found = []
    for folder, _, names in os.walk(root, onerror=raised):
        relative = os.path.relpath(folder, root)
        found += [name if relative == "." else f"{relative}/{name}" for name in names]
    return sorted(found)


def delete_tree(root: str) -> None:
    """Delete a directory with everything below; nothing happens when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root)


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
    sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Put the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
