"""Whole directories between this machine and the store.

Invariant: a directory of a checkpoint is handed out only when every file has the digest of its manifest, and a download
that broke off is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from roundhouse.errors import StoreError
from roundhouse.store.location import Location
from roundhouse.store.manifest import FileEntry, Reference, sha256
from roundhouse.store.stage import read_file, read_manifest


def upload_directory(location: Location, directory: Path) -> list[FileEntry]:
    """Write all files of a local directory to the store; the same names, digests taken on the way."""
    entries = []
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = file.relative_to(directory).as_posix()
        data = file.read_bytes()
        location.write(name, data)
        entries.append(FileEntry(path=name, size=len(data), sha256=sha256(data)))
    return entries


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
        return location.local_path
    target = cache / checkpoint.digest[:24]
    if target.is_dir():
        return target
    staging = _staging(cache)
    for entry in manifest.files:
        data, file = read_file(checkpoint, entry), staging / entry.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return _placed(staging, target)


def plain_directory(location: Location, cache: Path) -> Path:
    """The files right in a directory that has no manifest: in place on a file store, else downloaded once."""
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
