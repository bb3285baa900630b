"""Checkpoints on this node: fetched through the node's cache, in parallel ranges, with checked digests.

Invariants: a returned directory has the files of the checkpoint's manifest, if it has one. An entry of
`CheckpointCache` holds exactly the files of its key, which is made of names and digests. A step's output is therefore
available to the node's next step before its checkpoint has a manifest, and an equally named checkpoint of another run
is another entry. The cache only saves time: without it the checkpoint is fetched directly.

    directory, entry = fetch_checkpoint("s3://…/checkpoints/000012", node_cache)     its weights, for an engine

    cache = CheckpointCache(directory, max_bytes)
    place = cache.checkpoint(reference, scratch)      all of it, for a trainer; kept from deletion until `release`
    cache.keep(files, directory)                      files that this process has just written to the store
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roundhouse.errors import DataError, InfraError, StoreError
from roundhouse.store.directories import DIGESTS, FileDigests, local_directory
from roundhouse.store.location import Location, NotFound, file_digest
from roundhouse.store.stage import (
    MANIFEST,
    WEIGHTS_DIGEST,
    FileEntry,
    Manifest,
    Reference,
    is_as_written,
    model_location,
    read_manifest,
)
from roundhouse.weight_sync.cache import CacheEntry, NodeCache, entry_key, private_directory
from roundhouse.weight_sync.tensor_files import digest_of_tensors, needs_retyping, retype, tensor_digests, weight_files

logger = logging.getLogger(__name__)

RANGE_BYTES = 16 * 2**20
"""Under `details` of a checkpoint's manifest: the digest of its tensors."""
DOWNLOAD_THREADS = 8
"""One connection to a bucket is slower than the network."""


def local_path(uri: str) -> Path | None:
    """The path of a directory of this node (plain or file://); None when it is elsewhere."""
    if uri.startswith("file://"):
        return Path(uri[len("file://") :])
    return None if "://" in uri else Path(uri)


def fetch_checkpoint(uri: str, cache: NodeCache) -> tuple[Path, CacheEntry | None]:
    """Return a local directory with the checkpoint's weights; a remote one is held in the cache.

    Raises:
        DataError: safetensors files are missing or differ from the manifest.
        OSError: the store cannot be reached.
    """
    path = local_path(uri)
    if path is not None:
        if not path.is_dir():
            raise DataError(f"The weights directory {path} does not exist. Name a Hugging Face directory.")
        return model_location(Location(str(path))).local_path, None
    try:
        entry = _downloaded(uri, cache)
    except (StoreError, InfraError) as error:
        raise OSError(str(error)) from error
    return entry.path, entry


def fetch_in_dtype(uri: str, dtype: str, cache: NodeCache) -> tuple[Path, CacheEntry | None]:
    """Fetch as `fetch_checkpoint` does, with the weights in an engine's number format."""
    directory, entry = fetch_checkpoint(uri, cache)
    if not needs_retyping(directory, dtype):
        return directory, entry
    try:
        marks = [f"{path}:{path.stat().st_mtime_ns}:{path.stat().st_size}" for path in weight_files(directory)]
        retyped = cache.entry(entry_key("retyped", dtype, *marks), lambda partial: retype(directory, partial, dtype))
    finally:
        if entry is not None:
            entry.release()
    return retyped.path, retyped


def proved_digest(uri: str, directory: Path) -> str:
    """Return the digest of the tensors in a directory that was fetched or made from the checkpoint at `uri`.

    A digest taken during writing or fetching is valid while the files are unchanged: by their stamps in place, by the
    manifest of the node cache's entry. Everything else is read once more.

    Raises:
        DataError: whole safetensors files are missing.
    """
    files = weight_files(directory)
    if (left := FileDigests.beside(directory).weights(directory)) is not None:
        return left
    try:
        location = Location(uri)
        manifest = Manifest.model_validate_json(location.read(MANIFEST))
        digest = manifest.details.get(WEIGHTS_DIGEST)
        if location.is_local:
            named = manifest.model_files.by_name()
            place = model_location(location).local_path
            same = place == directory and all(
                file.name in named and is_as_written(location, named[file.name]) for file in files
            )
        else:
            same = directory.name == entry_key(uri, str(manifest))
    except (StoreError, ValueError):  # no checkpoint of a run
        same, digest = False, None
    return digest if same and digest is not None else digest_of_tensors(tensor_digests(files))


class CheckpointCache:
    """Checkpoint cache of one node, shared by several processes. `directory` outlives them."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._held: list[CacheEntry] = []
        self.fetched_bytes = 0
        """Bytes of checkpoints that were not cached when this process needed them."""

    def checkpoint(self, reference: Reference, scratch: Path) -> Path:
        """A directory with its files, their digests checked when they were fetched.

        Raises:
            StoreError: a file is missing or damaged.
        """
        manifest = read_manifest(reference)
        if Location(reference.uri).is_local:
            return local_directory(reference, scratch)
        key, size = content_key(manifest.model_files.named()), sum(file.size for file in manifest.files)

        def fill(partial: Path) -> None:
            files, source = manifest.model_files.by_name(), Location(reference.uri)
            for parent in {(partial / name).parent for name in files}:
                parent.mkdir(parents=True, exist_ok=True)
            source = source / manifest.directory if manifest.directory else source
            download(source, {name: file.size for name, file in files.items()}, partial)
            for name, file in files.items():
                if file_digest(partial / name) != file.sha256:
                    raise StoreError(
                        f"{reference.uri}/{file.path} is damaged: it differs from its manifest. Restore it."
                    )

        try:
            cache = self._cache()
            if (entry := cache.held(key)) is None:
                entry = cache.entry(key, fill)
                self.fetched_bytes += size
        except OSError as error:
            logger.warning("The node's cache of checkpoints cannot be used, and is done without: %s", error)
            self.fetched_bytes += size
            return local_directory(reference, scratch)
        self._held.append(entry)
        return entry.path

    def keep(self, files: Iterable[FileEntry], directory: Path) -> None:
        """Put the content of a directory into the cache, as the checkpoint of these files."""

        def copy(partial: Path) -> None:
            shutil.copytree(directory, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(DIGESTS))

        try:
            entry = self._cache().entry(content_key(files), copy)
        except (OSError, StoreError) as error:
            logger.warning("The next step of this node will fetch its checkpoint: %s", error)
            return
        entry.release()

    def _cache(self) -> NodeCache:
        return NodeCache(private_directory(self._directory, "roundhouse-checkpoints"), self._max_bytes)

    def release(self) -> None:
        """Allow the deletion of returned directories; may be called again."""
        for entry in self._held:
            entry.release()
        self._held.clear()


def content_key(files: Iterable[FileEntry]) -> str:
    lines = sorted(f"{file.sha256} {file.path}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def download(source: Location, sizes: Mapping[str, int], directory: Path, threads: int = DOWNLOAD_THREADS) -> None:
    """Copy objects of known sizes to a local directory; those of a bucket in ranges, by several threads. On return,
    every file has its object's size; digests prove the bytes.

    Raises:
        StoreError: an object is missing, or the store does not answer.
        DataError: an object is shorter than its stated size.
    """
    if source.is_local:
        source.download(list(sizes), directory)
        return
    files = {name: os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for name in sizes}
    try:
        for name, size in sizes.items():
            os.ftruncate(files[name], size)

        def fetch(wanted: tuple[str, int, int]) -> None:
            name, begin, end = wanted
            data = source.read_range(name, begin, end)
            if len(data) != end - begin:
                raise DataError(
                    f"{source.uri}/{name} differs from its manifest: it ends at byte {begin + len(data)} of {sizes[name]}. "
                    "Restore it."
                )
            os.pwrite(files[name], data, begin)

        with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
            ranges = (
                (name, begin, min(size, begin + RANGE_BYTES))
                for name, size in sizes.items()
                for begin in range(0, size, RANGE_BYTES)
            )
            for _ in pool.map(fetch, ranges):
                pass
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _downloaded(uri: str, cache: NodeCache) -> CacheEntry:
    # A bucket's listing may be late, and a run that was deleted and begun again under the same id is another one: the manifest
    # names the files and their digests. Only a directory without one is listed.
    source = Location(uri)
    try:
        manifest = Manifest.model_validate_json(source.read(MANIFEST))
    except NotFound:
        manifest = None
    except ValueError as error:
        raise DataError(f"{source.uri}/{MANIFEST} is not a manifest: {error}") from error
    files: dict[str, tuple[int, str | None]]
    if manifest is None:
        files = {name: (source.size(name), None) for name in source.names() if _is_weights(name)}
    else:
        source = source / manifest.directory if manifest.directory else source
        named = manifest.model_files.by_name()
        files = {name: (entry.size, entry.sha256) for name, entry in named.items() if _is_weights(name)}
    if not any(name.endswith(".safetensors") for name in files):
        raise DataError(f"No safetensors files at {uri}.")

    def fill(partial: Path) -> None:
        download(source, {name: size for name, (size, _) in files.items()}, partial)
        for name, (_, digest) in files.items():
            if digest is not None and file_digest(partial / name) != digest:
                raise DataError(f"{uri}/{name} differs from its manifest. Restore it.")

    return cache.entry(entry_key(uri, str(manifest)), fill)


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith((".safetensors", ".json"))
