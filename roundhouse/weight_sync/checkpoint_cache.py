"""Whole checkpoints in a node's cache, found by what they contain.

Invariant: an entry holds exactly the files of its key, which is made of their names and digests. So what a step has written is
there for the node's next step before its checkpoint has a manifest, and a checkpoint of another run under the same name is
another entry. The cache only saves time: where it cannot be used, the checkpoint is fetched as without it.

    cache = CheckpointCache(directory, max_bytes)
    place = cache.checkpoint(reference, scratch)      # fetched, unless it is there; kept from deletion until `release`
    cache.keep(files, directory)                      # what this process has just written to the store
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from roundhouse.errors import StoreError
from roundhouse.store.directories import local_directory
from roundhouse.store.location import Location
from roundhouse.store.manifest import FileEntry, Manifest, Reference
from roundhouse.store.stage import read_manifest
from roundhouse.weight_sync import ranged
from roundhouse.weight_sync.cache import CacheEntry, NodeCache, private_directory

logger = logging.getLogger(__name__)


class CheckpointCache:
    """Of one node; several processes use it at a time. `directory` outlives them."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._held: list[CacheEntry] = []
        self.fetched_bytes = 0
        """Of checkpoints that were not there when this process asked for them."""

    def checkpoint(self, reference: Reference, scratch: Path) -> Path:
        """A directory with its files, their digests checked when they were fetched.

        Raises:
            StoreError: a file is missing or damaged.
        """
        manifest = read_manifest(reference)
        if Location(reference.uri).is_local:
            return local_directory(reference, scratch)
        key, size = content_key(manifest.model_files.named()), sum(file.size for file in manifest.files)
        try:
            cache = self._cache()
            if (entry := cache.held(key)) is None:
                entry = cache.entry(key, lambda partial: _fetch(reference, manifest, partial))
                self.fetched_bytes += size
        except OSError as error:
            logger.warning("The node's cache of checkpoints cannot be used, and is done without: %s", error)
            self.fetched_bytes += size
            return local_directory(reference, scratch)
        self._held.append(entry)
        return entry.path

    def keep(self, files: Iterable[FileEntry], directory: Path) -> None:
        """Put what stands in a directory into the cache, as the checkpoint of these files."""
        try:
            entry = self._cache().entry(content_key(files), lambda partial: _copy(directory, partial))
        except (OSError, StoreError) as error:
            logger.warning("The next step of this node will fetch its checkpoint: %s", error)
            return
        entry.release()

    def _cache(self) -> NodeCache:
        return NodeCache(private_directory(self._directory, "roundhouse-checkpoints"), self._max_bytes)

    def release(self) -> None:
        """Let what was handed out be deleted; may be called again."""
        for entry in self._held:
            entry.release()
        self._held.clear()


def content_key(files: Iterable[FileEntry]) -> str:
    lines = sorted(f"{file.sha256} {file.path}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _fetch(reference: Reference, manifest: Manifest, partial: Path) -> None:
    files, source = manifest.model_files.by_name(), Location(reference.uri)
    for parent in {(partial / name).parent for name in files}:
        parent.mkdir(parents=True, exist_ok=True)
    source = source / manifest.directory if manifest.directory else source
    ranged.download(source, {name: file.size for name, file in files.items()}, partial)
    for name, file in files.items():
        with (partial / name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                raise StoreError(
                    f"{reference.uri}/{file.path} is damaged: it is not what its manifest says. Restore it."
                )


def _copy(directory: Path, partial: Path) -> None:
    shutil.copytree(directory, partial, dirs_exist_ok=True)
