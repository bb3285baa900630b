"""Files and directories that a program hands over, read and deleted without trust in their kind, size and depth.

Invariant: a read ends at once. A pipe, a device or a link in the place of a file is refused, since it may block or lead to
another place; a file larger than the limit is refused unread.
"""

from __future__ import annotations

import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class NotReadable(OSError):
    """The path names something else than a regular file, or a file beyond the limit."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: it does not exist.
        NotReadable: it is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a socket, or no permission
        raise NotReadable(f"{path.name} is not a regular file that can be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotReadable(f"{path.name} is not a regular file")
    with open(descriptor, "rb") as file:
        yield file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        FileNotFoundError: it does not exist.
        NotReadable: it is not a regular file, or larger than `most_bytes`.
    """
    with open_regular(path) as file:
        content = b"" if (size := os.fstat(file.fileno()).st_size) > most_bytes else file.read(most_bytes + 1)
    if max(size, len(content)) > most_bytes:
        raise NotReadable(f"{path.name} has more than {most_bytes} bytes")
    return content


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(root: Path) -> None:
    """Delete a directory that a program filled, however deep it is; a link is deleted, not followed.

    Entries that this user may not delete stay. Directories are moved up to the root one by one, since a program can nest them
    deeper than Python's recursion and longer than a path.
    """
    try:
        if root.is_symlink():
            root.unlink()
            return
        root.chmod(0o700)
        top = os.open(root, _DIRECTORY)
    except OSError:  # the program has deleted it, or put something else there
        return
    prefix, numbers, waiting = secrets.token_hex(8), itertools.count(), ["."]
    try:
        while waiting:
            with suppress(OSError):
                waiting += _emptied(waiting.pop(), top, (f"{prefix}-{number}" for number in numbers))
    finally:
        os.close(top)
    with suppress(OSError):
        os.rmdir(root)


def _emptied(name: str, top: int, names: Iterator[str]) -> list[str]:
    """Delete a directory of `top`, and return the names to which its directories were moved there."""
    descriptor = os.open(name, _DIRECTORY, dir_fd=top)
    moved = []
    try:
        with os.scandir(descriptor) as entries:
            content = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry, is_directory in content:
            with suppress(OSError):
                if is_directory:
                    place = next(names)
                    os.chmod(entry, 0o700, dir_fd=descriptor)  # to move it and to read it
                    os.rename(entry, place, src_dir_fd=descriptor, dst_dir_fd=top)
                    moved.append(place)
                else:
                    os.unlink(entry, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    if name != ".":
        with suppress(OSError):
            os.rmdir(name, dir_fd=top)
    return moved
