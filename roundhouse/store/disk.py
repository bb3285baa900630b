"""Objects of a store on a file system.

Invariants: an object appears under its name whole or not at all, even after a power failure: its bytes are on the disk
before its name, and its name, with the names of new directories, before the call returns. A name never leads out of its
directory, not even through a link. A temporary file that is deleted during a write is written again.

A file's *stamp* is its modification time, which `settle` sets back by a second, so that any later write, even within
the same tick of the kernel's clock, changes it. A file with the stamp of the moment of its hashing therefore holds the
hashed bytes, unless the disk failed, which shows when they are read.

Assumptions: rename and link are atomic, and fsync is honest. Network file systems vary.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from roundhouse.errors import StoreError

Buffer = bytes | bytearray | memoryview
_TRIES = 5
"""Number of writes if the temporary file vanishes, once per concurrent deletion."""
CHUNK_BYTES = 4 * 2**20
"""Part of a file that is in memory at a time."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WRITE_ERRORS = NO_ROOM | {errno.EIO, errno.EROFS}
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
    temporary = target.with_name(temporary_name(target.name))
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
        status = os.fstat(descriptor)
        os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns - _SETTLED_NS))
        if sync:
            os.fsync(descriptor)
        return str(os.fstat(descriptor).st_mtime_ns)
    finally:
        os.close(descriptor)


def begin_write_back(descriptor: int, begin: int, size: int) -> None:
    """Ask the kernel to write these bytes of a file to the disk, without waiting. Otherwise it collects gigabytes in
    memory, and the caller of fsync waits for all of them. Without support by the system (Linux has it), do nothing."""
    if (call := getattr(_LIBC, "sync_file_range", None)) is not None:
        call(descriptor, ctypes.c_int64(begin), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def stamp(path: Path) -> str:
    return str(path.stat().st_mtime_ns)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.FileIO]:
    """Open a regular file for reading, unbuffered. A fifo or a device is an error, because opening it could wait for
    its writer.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with io.FileIO(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield stream


def chunks_of(path: Path) -> Iterator[bytes]:
    """A file's bytes, a bounded part at a time."""
    with opened(path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a path in the error of a write to it. The system names it only if the file cannot be opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _WRITE_ERRORS:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for the block, and name it in an error of a write."""
    with naming(path), path.open("wb") as stream:
        yield stream


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


def temporary_name(name: str) -> str:
    """Return a new name for a write to the object of this name."""
    return f".{name}.{uuid.uuid4().hex}"


def is_temporary(name: str) -> bool:
    """Return whether an object's name belongs to an unfinished write."""
    return _TEMPORARY.search(name) is not None


def unchanged_since(root: str, names: Iterable[str], seconds: float) -> list[str]:
    """Return the files that have not changed for so long. A file written now gives the file system's present time for
    the comparison."""
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
        # A directory that vanished during the listing is empty; a directory that cannot be read is an error
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    paths = []
    for folder, _, names in os.walk(root, onerror=raised):
        relative = os.path.relpath(folder, root)
        paths += [name if relative == "." else f"{relative}/{name}" for name in names]
    return sorted(paths)


def delete_tree(root: str) -> None:
    """Delete a directory with everything below; nothing happens when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root)


def _write_temporary(target: Path, data: bytes) -> Path:
    _make_directory(target.parent)
    temporary = target.with_name(temporary_name(target.name))
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
