"""Transfer of whole directories between this machine and the store.

Invariants: a checkpoint's directory is returned only if every file has the digest of its manifest; an interrupted
download is never used. Every upload has a separate place, so published files are never written again, even by a process
that wrongly believes it drives the run. Only a bounded part of a file is in memory. Of the checkpoints downloaded from
a bucket, the `KEPT_DOWNLOADS` last used ones stay, and those in use: a reader holds a kernel lock (flock) on the
directory, which ends with its process.

    checkpoints/000012/a0002-1f3c9a2e/config.json, model.safetensors …, trainer/…     of the train stage's second attempt
    checkpoints/000012/manifest.json                                                  "directory": "a0002-1f3c9a2e"

A trainer saves into `scratch_beside` the checkpoint, and `upload_model` moves the files: on a file store the bytes are
written once (`store_model` does both). A writer that hashes its files leaves a `FileDigests` with them, and they are
not read again. A `StoredModel` names a model in the store for any process that loads it.

`copy_object` copies an object from another directory, by a hard link on one file system, by the server in S3, else by
reading and writing. The copy is independent, because objects are replaced and never changed in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundhouse.config.models import RunConfig
from roundhouse.errors import StoreError
from roundhouse.store import disk
from roundhouse.store.location import Location, NotFound
from roundhouse.store.stage import FileEntry, Manifest, ModelFiles, Reference, faults_of, model_location, read_manifest

DIGESTS = "digests.json"
"""Name of the digest file next to hashed files until their upload; not part of a checkpoint."""
CACHE_VARIABLE = "ROUNDHOUSE_CACHE"
KEPT_DOWNLOADS = 4
"""Room for two runs at a time, each with a version that changes every step and a reference that every step reads."""
_DOWNLOAD = re.compile(r"[0-9a-f]{24}")
_DOOMED = "deleted-"


class FileDigests(BaseModel):
    """Digests of a directory's files from their writer, in the directory's `digests.json`."""

    model_config = ConfigDict(extra="forbid")

    files: dict[str, FileEntry] = {}
    """By name, with the stamp of the moment in which they were whole."""
    weights_digest: str | None = None
    """Digest of the tensors of all its safetensors files."""

    @classmethod
    def beside(cls, directory: Path) -> FileDigests:
        """Read the digests of a directory; empty if the file is missing."""
        try:
            return cls.model_validate_json((directory / DIGESTS).read_bytes())
        except (FileNotFoundError, ValidationError):
            return cls()

    def leave(self, directory: Path) -> None:
        """Add these to another writer's, after which the digest of all tensors is unknown."""
        before = FileDigests.beside(directory)
        weights_digest = None if before.files.keys() - self.files.keys() else self.weights_digest
        both = FileDigests(files=before.files | self.files, weights_digest=weights_digest)
        (directory / DIGESTS).write_text(both.model_dump_json())

    def of(self, path: Path) -> FileEntry | None:
        """Return the entry of a file if the file is unchanged since."""
        entry = self.files.get(path.name)
        unchanged = entry is not None and (path.stat().st_size, disk.stamp(path)) == (entry.size, entry.stamp)
        return entry if unchanged else None

    def weights(self, directory: Path) -> str | None:
        """Return the digest of the directory's tensors; None if a file is unknown or has changed."""
        present = sorted(directory.glob("*.safetensors"))
        return self.weights_digest if present and all(self.of(path) is not None for path in present) else None


def own_place(attempt: str) -> str:
    """A new name for the directory of an attempt's files in a checkpoint."""
    return f"a{attempt}-{uuid.uuid4().hex[:8]}"


@contextmanager
def scratch_beside(location: Location) -> Iterator[Path]:
    """An empty directory, for as long as the block, from which files can be moved into the location: of a file store, on its
    own file system; of a bucket, on this machine's."""
    if location.is_local:
        location.local_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=".saving-", dir=location.local_path if location.is_local else None
    ) as directory:
        yield Path(directory)


def store_model(save: Callable[[Path], None], location: Location, attempt: str) -> ModelFiles:
    """Have a model saved into an empty directory, and make its files those of an attempt at a checkpoint.

    Args:
        attempt: as of `upload_model`.
    """
    with scratch_beside(location) as directory:
        save(directory)
        return upload_model(location, attempt, directory, move=True)


def upload_model(location: Location, attempt: str, directory: Path, *, move: bool = False) -> ModelFiles:
    """Write all files of a local directory to a new place in a checkpoint.

    Args:
        attempt: name of the stage's attempt that writes it, such as `0002`.
        move: move the directory's files (`scratch_beside`).
    """
    place, entries = own_place(attempt), []
    known = {folder: FileDigests.beside(folder) for folder in [directory, *directory.rglob("*/")]}
    weights_digest = known[directory].weights_digest
    for file in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != DIGESTS):
        name = f"{place}/{file.relative_to(directory).as_posix()}"
        digests = known[file.parent]
        entry = digests.of(file)
        written = location.write_file(name, file, None if entry is None else entry.sha256, move=move)
        if file.parent == directory and file.suffix == ".safetensors":
            named = digests.files.get(file.name)
            if named is None or named.sha256 != written.sha256:
                weights_digest = None
        entries.append(FileEntry(path=name, size=written.size, sha256=written.sha256, stamp=written.stamp))
    return ModelFiles(directory=place, files=entries, weights_digest=weights_digest)


def local_directory(checkpoint: Reference, cache: Path) -> Path:
    """Return the checkpoint's files on this machine, with checked digests: in place on a file store, else downloaded
    once. A download is kept until this process ends.

    Raises:
        StoreError: a file is missing or damaged.
    """
    location = Location(checkpoint.uri)
    if location.is_local:
        manifest = read_manifest(checkpoint)
        _refuse_damaged(location, manifest.files)
        return _in_place(location, manifest)
    directory, _ = _downloaded(checkpoint, cache)  # the lock is never closed
    return directory


def _downloaded(checkpoint: Reference, cache: Path) -> tuple[Path, int]:
    """Return the directory of a remote checkpoint's files, and the lock that keeps them until it is closed."""
    manifest, target = read_manifest(checkpoint), cache / _downloaded_as(checkpoint)
    while (lock := _locked(target, fcntl.LOCK_SH)) is None:
        _download(Location(checkpoint.uri), manifest, target)
    os.utime(target)
    _delete_unused(cache)
    return target, lock


def _downloaded_as(checkpoint: Reference) -> str:
    return checkpoint.digest[:24]


def _plain_as(location: Location) -> str:
    return f"plain-{hashlib.sha256(location.uri.encode()).hexdigest()[:24]}"


def _download(location: Location, manifest: Manifest, target: Path) -> None:
    staging = _staging(target.parent)
    try:
        download_files(location, manifest.model_files.by_name(), staging)
        os.utime(staging)
        _placed(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def download_files(location: Location, files: Mapping[str, FileEntry], directory: Path) -> None:
    """Download files under new names and compare each with the digest that was committed.

    Raises:
        StoreError: a file is missing or damaged.
    """
    for name, entry in files.items():
        digest, path = hashlib.sha256(), directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk.writing(path) as stream:
            for chunk in location.read_streamed(entry.path):
                digest.update(chunk)
                stream.write(chunk)
        if digest.hexdigest() != entry.sha256:
            raise _damaged(location, entry, f"has digest {digest.hexdigest()[:12]}…")


def _locked(directory: Path, kind: int) -> int | None:
    """A lock on a downloaded checkpoint; None when it is not there, or cannot be had now."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        had = True
    except OSError as error:  # on a file system without such locks everything can be read, and nothing is deleted
        had = kind == fcntl.LOCK_SH and not isinstance(error, BlockingIOError)
    with suppress(FileNotFoundError):
        if had and os.path.samestat(directory.stat(), os.fstat(descriptor)):
            return descriptor
    os.close(descriptor)
    return None


def _delete_unused(cache: Path) -> None:
    """Delete the downloads that no process reads, but the last used."""
    unused = []
    for path in cache.iterdir():
        with suppress(FileNotFoundError):  # another process deleted it
            if _DOWNLOAD.fullmatch(path.name):
                unused.append((path.stat().st_mtime, path))
    for _, path in sorted(unused, reverse=True)[KEPT_DOWNLOADS:]:
        if (lock := _locked(path, fcntl.LOCK_EX)) is not None:
            with suppress(OSError):  # it costs room, and the checkpoint that was asked for is there
                path.rename(tempfile.mkdtemp(prefix=_DOOMED, dir=cache))
            os.close(lock)
    for doomed in cache.glob(f"{_DOOMED}*"):  # includes files of killed processes
        shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def directory_checked_meanwhile(checkpoint: Reference, cache: Path) -> Iterator[Path]:
    """Yield `local_directory` to a block that reads all of it. On a file store the digests are checked at the same
    time, so that the disk is read once. The block's results are valid only after the block ends without an error.

    Raises:
        StoreError: a file is missing or damaged, even if the block raised another error.
    """
    location = Location(checkpoint.uri)
    if not location.is_local:
        directory, lock = _downloaded(checkpoint, cache)
        try:
            yield directory
        finally:
            os.close(lock)
        return
    manifest = read_manifest(checkpoint)
    with ThreadPoolExecutor(1, thread_name_prefix="check") as pool:
        checked = pool.submit(_refuse_damaged, location, manifest.files)
        try:
            yield _in_place(location, manifest)
        finally:
            checked.result()


def _in_place(location: Location, manifest: Manifest) -> Path:
    return (location / manifest.directory if manifest.directory else location).local_path


def _refuse_damaged(location: Location, entries: Sequence[FileEntry]) -> None:
    for entry, what in zip(entries, faults_of(location, entries), strict=True):
        if what is not None:
            raise _damaged(location, entry, what)


def _damaged(location: Location, entry: FileEntry, what: str) -> StoreError:
    return StoreError(
        f"{location.uri}/{entry.path} is damaged: it {what}; committed were {entry.size} bytes with digest "
        f"{entry.sha256[:12]}…. Restore it, or delete the stage's manifest to run it again."
    )


def plain_directory(location: Location, cache: Path) -> Path:
    """Return the top-level files of a model's directory without digest checks: in place on a file store, else
    downloaded once."""
    location = model_location(location)
    if location.is_local:
        return location.local_path
    target = cache / _plain_as(location)
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


class StoredModel(BaseModel):
    """A model's directory in the store, or one below it: what any process that reaches the store can load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: str
    """URI of a checkpoint or of a plain model directory."""
    checkpoint: Reference | None = None
    """Checkpoint with digests to check; None: a plain directory, of which only top-level files are read."""
    below: str = ""
    """Such as `trainer/critic`."""
    cache: Path | None = Field(default=None, exclude=True)
    """Cache directory of this machine for downloads."""

    @classmethod
    def of(cls, checkpoint: Reference, cache: Path) -> StoredModel:
        return cls(uri=checkpoint.uri, checkpoint=checkpoint, cache=cache)

    def __truediv__(self, name: str) -> StoredModel:
        return self.model_copy(update={"below": f"{self.below}/{name}".removeprefix("/")})

    def __str__(self) -> str:
        return f"{self.uri}/{self.below}".rstrip("/")

    def is_dir(self) -> bool:
        """Return whether it contains a file."""
        if self.checkpoint is not None:
            names = list(read_manifest(self.checkpoint).model_files.by_name())
        else:
            names = model_location(Location(self.uri)).tree()
        return not self.below or any(name.startswith(f"{self.below}/") for name in names)

    @contextmanager
    def read(self) -> Iterator[Path]:
        """The whole model's directory on this machine, for a block that loads it."""
        assert self.cache is not None, "set by the machine that reads"
        if self.checkpoint is None:
            yield plain_directory(Location(self.uri), self.cache)
            return
        with directory_checked_meanwhile(self.checkpoint, self.cache) as directory:
            yield directory

    def read_file(self, name: str) -> bytes:
        """Read one of its files, such as `config.json`.

        Raises:
            NotFound: a file of this name is missing.
        """
        name = f"{self.below}/{name}".removeprefix("/")
        if self.checkpoint is None:
            return model_location(Location(self.uri)).read(name)
        if (entry := read_manifest(self.checkpoint).model_files.by_name().get(name)) is None:
            raise NotFound(f"{self.uri} has no {name}")
        return Location(self.uri).read(entry.path)

    @property
    def cached_as(self) -> str:
        """Return its name in the cache, for a model that must be downloaded."""
        if self.checkpoint is None:
            return _plain_as(model_location(Location(self.uri)))
        return _downloaded_as(self.checkpoint)


class LoadedModels:
    """Models that one process has loaded through a separate cache; the last one of each role stays in memory."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self._last: dict[str, str] = {}

    def here(self, model: StoredModel) -> StoredModel:
        """The model, to be downloaded into this cache."""
        return model.model_copy(update={"cache": self.cache})

    def loaded(self, role: str, model: StoredModel) -> None:
        """Delete the downloads that no role was loaded from last; a critic lies in its policy's."""
        if not self.cache.is_dir():
            return
        with suppress(StoreError, OSError):  # it costs room, and the model is loaded
            self._last[role] = model.cached_as
            for path in self.cache.iterdir():
                if path.name not in self._last.values():
                    shutil.rmtree(path)


ModelSource = Path | StoredModel
"""A directory of this machine, or one of the store."""


@contextmanager
def on_this_machine(model: ModelSource, state: ModelSource | None) -> Iterator[tuple[Path, Path | None]]:
    """Directories for a block that loads a model and a trainer's state; what both are in is read once.

    Raises:
        StoreError: a file is missing or damaged, whatever the block has raised of it.
    """
    with ExitStack() as opened:
        roots: dict[str, Path] = {}

        def placed(source: ModelSource) -> Path:
            if isinstance(source, Path):
                return source
            if source.uri not in roots:
                roots[source.uri] = opened.enter_context(source.read())
            return roots[source.uri] / source.below

        yield placed(model), None if state is None else placed(state)


def take_over(origin: Reference, location: Location, attempt: str, state: Reference | None = None) -> ModelFiles:
    """Copy the files of a checkpoint to an attempt at another one.

    Args:
        state: the stage of the trainer's state, if the checkpoint does not hold it.

    Raises:
        StoreError: a file is missing, or can be neither linked nor copied.
    """
    place, entries = own_place(attempt), []
    for taken in (origin,) if state is None else (origin, state):
        manifest, source = read_manifest(taken), Location(taken.uri)
        theirs = source / manifest.directory if manifest.directory else source
        for name, entry in manifest.model_files.by_name().items():
            stamp = copy_object(theirs, location / place, name)
            # A link keeps its origin's stamp, which shows whether the origin is unchanged since its commit; a copy
            # must be read.
            link_stamp = stamp if source.is_local and stamp == entry.stamp else None
            entries.append(entry.model_copy(update={"path": f"{place}/{name}", "stamp": link_stamp}))
    return ModelFiles(directory=place, files=entries)


def copy_object(source: Location, target: Location, name: str) -> str:
    """Copy the source's object to the target under the same name, and return the copy's stamp.

    Raises:
        NotFound: the source does not have the object.
        StoreError: it can be neither linked nor copied.
    """
    target.exists(name)  # refuses names that would lead out of the directory
    if not source.exists(name):
        raise NotFound(f"cannot take over {source.uri}/{name}: it does not exist")
    if source.is_local and target.is_local and _linked(source.local_path / name, target.local_path / name):
        return target.stamp(name)[1]
    if not source.is_local and not target.is_local:
        target.copy_from(source, name)
        return target.stamp(name)[1]
    return target.write_streamed(name, source.read_streamed(name), source.size(name)).stamp


def _linked(source: Path, target: Path) -> bool:
    """Try to link the target to the source's file and return whether it succeeded. Links need one file system that
    supports them."""
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


def checkpoint_cache(config: RunConfig) -> Path:
    """Return the directory of this machine for checkpoints of a remote store."""
    return Path(config.infra.state) / "cache"


def policy_cache(config: RunConfig) -> Path:
    """Return the directory of this machine for warm starts and converted models: `ROUNDHOUSE_CACHE`, else that of checkpoints.

    Entries are stored under the digest of their inputs, so runs with different state directories can share one cache.
    """
    return Path(os.environ.get(CACHE_VARIABLE) or checkpoint_cache(config))
