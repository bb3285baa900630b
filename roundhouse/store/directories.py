"""Whole directories between this machine and the store.

Invariants: a directory of a checkpoint is handed out only when every file has the digest of its manifest, and a download
that broke off is never taken for a whole one. Every upload has a place of its own, so nothing that was published is ever
written again, whoever else believes to drive the run.

    checkpoints/000012/a0002-1f3c9a2e/config.json, model.safetensors …, trainer/…     of the train stage's second attempt
    checkpoints/000012/manifest.json                                                  "directory": "a0002-1f3c9a2e"

`copy_object` copies an object from another directory of a store, without moving its bytes where that is possible. Afterwards
the object is the target's own. Deleting or replacing it on either side is no matter to the other, because
objects are replaced, never changed in place. On one file system it is a hard link; in S3 the server copies; else it is read
and written.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import uuid
from pathlib import Path

import fsspec

from roundhouse.errors import StoreError
from roundhouse.store import disk
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import FileEntry, ModelFiles, Reference, model_location, sha256
from roundhouse.store.stage import read_file, read_manifest


def own_place(attempt: str) -> str:
    """A new name for the directory of an attempt's files in a checkpoint."""
    return f"a{attempt}-{uuid.uuid4().hex[:8]}"


def upload_model(location: Location, attempt: str, directory: Path) -> ModelFiles:
    """Write all files of a local directory to a place of their own in a checkpoint; digests are taken on the way.

    Args:
        attempt: name of the stage's attempt that writes it, such as `0002`.
    """
    place, entries = own_place(attempt), []
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = f"{place}/{file.relative_to(directory).as_posix()}"
        data = file.read_bytes()
        location.write(name, data)
        entries.append(FileEntry(path=name, size=len(data), sha256=sha256(data)))
    return ModelFiles(directory=place, files=entries)


def local_directory(checkpoint: Reference, cache: Path) -> Path:
    """The checkpoint's files on this machine, digests checked: in place on a file store, else downloaded once.

    Raises:
        StoreError: a file is missing or damaged.
    """
    manifest = read_manifest(checkpoint)
    location = Location(checkpoint.uri)
    if location.is_local:
        for entry in manifest.files:
            read_file(checkpoint, entry)
        return (location / manifest.directory if manifest.directory else location).local_path
    target = cache / checkpoint.digest[:24]
    if target.is_dir():
        return target
    staging = _staging(cache)
    for name, entry in manifest.model_files.by_name().items():
        data, file = read_file(checkpoint, entry), staging / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return _placed(staging, target)


def plain_directory(location: Location, cache: Path) -> Path:
    """The files right in a model's directory whose digests nobody asks for: in place on a file store, else downloaded once."""
    location = model_location(location)
    if location.is_local:
        return location.local_path
    target = cache / f"plain-{hashlib.sha256(location.uri.encode()).hexdigest()[:24]}"
    if target.is_dir():
        return target
    staging = _staging(cache)
    location.download([name for name in location.tree() if "/" not in name], staging)
    return _placed(staging, target)


def _staging(cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=cache))


def _placed(staging: Path, target: Path) -> Path:
    try:
        staging.rename(target)
    except OSError as error:
        if not target.is_dir():  # else another process was quicker; its copy is the same
            raise StoreError(f"cannot place the download in {target}: {error}") from error
    return target


def copy_object(source: Location, target: Location, name: str) -> None:
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
        origin, copy = f"{source.uri}/{name}", f"{target.uri}/{name}"
        try:
            fsspec.filesystem("s3", use_listings_cache=False, default_fill_cache=False).cp_file(origin, copy)
        except OSError as error:
            raise StoreError(
                f"cannot copy {origin} to {copy}: {error}. May these credentials read the one and write the other?"
            ) from error
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
    disk.sync_directory(target.parent)
    return True
