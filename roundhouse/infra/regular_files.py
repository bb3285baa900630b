"""Files that a program hands over, read without trust in their kind and size.

Invariant: a read ends at once. A pipe, a device or a link in the place of a file is refused, since it may block or lead to
another place; a file larger than the limit is refused unread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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
