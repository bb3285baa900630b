"""Whole directories between this machine and the store.

Invariants: a directory of a checkpoint is handed out only when every file has the digest of its manifest, and a download
that broke off is never taken for a whole one. Every upload has a place of its own, so nothing that was published is ever
written again, whoever else believes to drive the run.

    checkpoints/000012/a0002-1f3c9a2e/config.json, model.safetensors …, trainer/…     of the train stage's second attempt
    checkpoints/000012/manifest.json                                                  "directory": "a0002-1f3c9a2e"
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from pathlib import Path

from roundhouse.errors import StoreError
from roundhouse.store.location import Location
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
