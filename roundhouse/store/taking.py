"""Take over an object from another directory of a store without moving its bytes, where that can be done.

Invariant: afterwards the object is the target's own. Deleting or replacing it on either side is no matter to the other, because
objects are replaced, never changed in place. On one file system it is a hard link; in S3 the server copies; else it is read
and written.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import fsspec

from roundhouse.errors import StoreError
from roundhouse.store.location import Location, NotFound


def take(source: Location, target: Location, name: str) -> None:
    """Make the source's object the target's, under the same name.

    Raises:
        NotFound: the source has none.
        StoreError: it can be neither linked nor copied.
    """
    target.exists(name)  # refuses names that would lead out of the directory
    if not source.exists(name):
        raise NotFound(f"cannot take over {source.uri}/{name}: it does not exist")
    if source.is_local and target.is_local and _linked(source.local_path / name, target.local_path / name):
        return
    if not source.is_local and not target.is_local:
        _copy_in_bucket(f"{source.uri}/{name}", f"{target.uri}/{name}")
        return
    target.write(name, source.read(name))


def _linked(source: Path, target: Path) -> bool:
    """Whether the target is the source's file now. Not every file system links, and none links to another."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        os.link(source, temporary)
    except OSError:
        return False
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # `replace` leaves it when both are one file already
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _copy_in_bucket(source: str, target: str) -> None:
    try:
        fsspec.filesystem("s3", use_listings_cache=False, default_fill_cache=False).cp_file(source, target)
    except OSError as error:
        raise StoreError(
            f"cannot copy {source} to {target}: {error}. May these credentials read the one and write the other?"
        ) from error
