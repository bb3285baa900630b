"""A directory of the store on a file system or in a bucket, with the few operations that commits need.

Contract, the same for file:// and s3://:
* `write` replaces a whole object or leaves it unchanged: a reader never sees a part of one.
* `create` succeeds for exactly one of several writers (rename-free link on a file system, If-None-Match on S3); the
  others get `AlreadyExists`.
* `names` and `tree` are never served from a cache here, but a bucket may list late: new objects may be missing and
deleted
  ones listed. Only `read` shows whether an object exists.
* A name cannot leave its directory, not even through a link.
Every failure is a `StoreError` that names the object and the remedy, if one is known.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fsspec.implementations.local import LocalFileSystem

from roundhouse.config.secrets import masked_text
from roundhouse.errors import DiskFull, StoreError
from roundhouse.store import bucket, disk
from roundhouse.store.bucket import StoreUnavailable

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*(/[A-Za-z0-9][A-Za-z0-9._=-]*)*")
_LONGEST_PART, _LONGEST_NAME = 200, 800
"""File systems take 255 bytes a part, a temporary name needs some of them; S3 takes 1024 for the key."""


class AlreadyExists(StoreError):
    """Another writer created this object first."""


class NotFound(StoreError):
    """The object does not exist."""


class NoBucket(StoreError):
    """The store's bucket does not exist, so nothing in it can be reported missing."""


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """Size, digest and stamp of a written object."""

    size: int
    sha256: str
    stamp: str
    """`Location.stamp`, when it was whole."""


class _Waiting:
    """Seconds in which at least one thread of this process waited for a store."""

    def __init__(self) -> None:
        self._lock, self._threads, self._since, self._before = threading.Lock(), 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Up to now, since the process began."""
        with self._lock:
            return self._before + (time.monotonic() - self._since if self._threads else 0.0)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The block waits."""
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                self._since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._before += time.monotonic() - self._since


waiting = _Waiting()


class _Hashed:
    """Stream that hashes its bytes.

    Args:
        sha256: digest of all bytes, if it is known; otherwise it is computed.
    """

    def __init__(self, chunks: Iterable[bytes], sha256: str | None = None) -> None:
        self._chunks = chunks
        self.size, self._known, self._taken = 0, sha256, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            if self._known is None:
                self._taken.update(chunk)
            self.size += len(chunk)
            yield chunk

    @property
    def sha256(self) -> str:
        """When all have passed."""
        return self._known or self._taken.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a local file."""
    with disk.opened(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_digests(directory: Path) -> dict[str, str]:
    """Return the digests of a local directory's files by name; a cache entry is whole if they equal its recorded
    ones."""
    return {file.name: file_digest(file) for file in sorted(directory.iterdir())}


class Location:
    """A directory by URI: a local path, file:///path or s3://bucket/prefix.

    S3 credentials, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …).
    """

    def __init__(self, uri: str, _fs: Any = None) -> None:
        if "://" not in uri:
            uri = f"file://{Path(uri).resolve()}"
        scheme = uri.split("://", 1)[0]
        if scheme not in ("file", "s3"):
            raise StoreError(f"store URI {uri!r}: scheme {scheme!r} is not supported; use a path, file:// or s3://.")
        if scheme == "s3" and "@" in urlsplit(uri).netloc:
            raise StoreError("a store URI holds no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")
        self.uri = uri.rstrip("/")
        self.is_local = scheme == "file"
        self._fs = _fs if _fs is not None or self.is_local else bucket.open_bucket()
        self._root: str = (LocalFileSystem if self.is_local else self._fs)._strip_protocol(self.uri)

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.uri}/{_checked(name)}", self._fs)

    def __repr__(self) -> str:
        return f"Location({self.uri!r})"

    @property
    def local_path(self) -> Path:
        """The directory on this machine's file system.

        Raises:
            StoreError: the location is a bucket.
        """
        if not self.is_local:
            raise StoreError(f"{self.uri} is not on this machine's file system; download it first.")
        return Path(self._root)

    def write(self, name: str, data: bytes) -> None:
        """Write or replace an object, atomically."""
        with self._reported("write", name):
            if self.is_local:
                disk.replace(self._file(name), data)
            else:
                self._request("pipe_file", self._key(name), data, chunksize=bucket.CHUNK_BYTES)

    def create(self, name: str, data: bytes) -> None:
        """Create an object that does not exist yet.

        Raises:
            AlreadyExists: another writer was first; its object is unchanged.
        """
        with self._reported("create", name):
            if self.is_local:
                disk.create(self._file(name), data)
            else:
                try:
                    with waiting.counted():
                        bucket.verify_conditional_writes(self._bucket_probe())
                        bucket.create(self._fs, self._key(name), data)
                except FileExistsError:
                    # If the reply to a request is lost, the repeated request finds the object of the first one.
                    if self.read(name) != data:
                        raise

    def verify_exclusive_creation(self) -> None:
        """Reject a store in which a second writer can create an object again. A bucket is tested once in a process.

        Raises:
            StoreError: the store does not choose one of several writers, or cannot be written.
        """
        if not self.is_local:
            with self._reported("write to", ""), waiting.counted():
                bucket.verify_conditional_writes(self._bucket_probe())
            return
        name = f"probe-{uuid.uuid4().hex}"
        try:
            self.create(name, b"first")
            with suppress(AlreadyExists):
                self.create(name, b"second")
                raise StoreError(
                    f"{self.uri} lets a second writer replace an object. Use a file system with hard links."
                )
        finally:
            with suppress(StoreError):
                self.delete(name)

    def _bucket_probe(self) -> bucket.BucketProbe:
        """Return a probe with the name of a temporary file, so that a rest of it is hidden, and collected as one."""
        name = disk.temporary_name("probe")
        return bucket.BucketProbe(bucket.endpoint(), self._root.split("/", 1)[0], self._fs, f"{self._root}/{name}")

    def write_streamed(
        self, name: str, chunks: Iterable[bytes], size: int = 0, sha256: str | None = None
    ) -> WrittenObject:
        """Write or replace an object from a stream, hashed on the way; only a few parts are in memory at a time.

        Args:
            size: approximate number of bytes, if known; required above 150 GiB.
            sha256: digest of the bytes, if it is known; otherwise it is computed.
        """
        passed = _Hashed(chunks, sha256)
        with self._reported("write", name):
            if self.is_local:
                stamp = disk.replace_streamed(self._file(name), passed)
            else:
                with waiting.counted():
                    bucket.upload(self._fs, self._key(name), passed, bucket.part_bytes_for(size))
                stamp = self.stamp(name)[1]
        return WrittenObject(passed.size, passed.sha256, stamp)

    def write_file(self, name: str, path: Path, sha256: str | None = None, *, move: bool = False) -> WrittenObject:
        """Write or replace an object with a local file's bytes.

        Args:
            sha256: digest of the file, if it is known; otherwise the file is read.
            move: move the file: on the store's file system it becomes the object without a copy.
        """
        size = path.stat().st_size
        if self.is_local and move:
            digest = sha256 or file_digest(path)
            with self._reported("write", name):
                try:
                    return WrittenObject(size, digest, disk.move(path, self._file(name)))
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
        return self.write_streamed(name, disk.chunks_of(path), size, sha256)

    def copy_from(self, source: Location, name: str) -> None:
        """Write or replace an object with the one of this name in another directory of a bucket; the server copies.

        Raises:
            NotFound: the source does not exist.
        """
        origin = source._key(name)
        with self._reported(f"copy {source.uri}/{name} to", name), waiting.counted():
            try:
                # no limit on the total: a large object is copied in many parts, each a request with a separate limit
                bucket.answered(self._fs, lambda _: self._fs.cp_file(origin, self._key(name)))
            except PermissionError as error:
                raise StoreError(
                    f"cannot copy {source.uri}/{name} to {self.uri}/{name}: {masked_text(str(error))}. "
                    "May these credentials read the one and write the other?"
                ) from error

    def read_streamed(self, name: str) -> Iterator[bytes]:
        """Yield the object's bytes in bounded parts.

        Raises:
            NotFound: the object does not exist.
        """
        with self._reported("read", name):
            if self.is_local:
                yield from disk.chunks_of(self._file(name))
                return
            begin = 0
            while chunk := self._range(name, begin, begin + bucket.CHUNK_BYTES):
                yield chunk
                begin += len(chunk)
                if len(chunk) < bucket.CHUNK_BYTES:
                    return

    def digest(self, name: str) -> tuple[int, str]:
        """Return size and SHA-256 of an object, read in bounded parts.

        Raises:
            NotFound: the object does not exist.
        """
        passed = _Hashed(self.read_streamed(name))
        for _ in passed:
            pass
        return passed.size, passed.sha256

    def stamp(self, name: str) -> tuple[int, str]:
        """Return an object's size and its stamp, which every write changes: a file's modification time, a bucket
        object's ETag.

        Raises:
            NotFound: the object does not exist.
        """
        with self._reported("look up", name):
            if self.is_local:
                path = self._file(name)
                return path.stat().st_size, disk.stamp(path)
            entry = self._request("info", self._key(name))
            return int(entry["size"]), str(entry.get("ETag", ""))

    def read(self, name: str) -> bytes:
        """Return the whole object.

        Raises:
            NotFound: the object does not exist.
        """
        with self._reported("read", name):
            if self.is_local:
                with disk.opened(self._file(name)) as stream:
                    return stream.readall()
            return self._request("cat_file", self._key(name))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` of an object, or fewer at its end.

        Raises:
            NotFound: the object does not exist.
        """
        with self._reported("read", name):
            if self.is_local:
                with disk.opened(self._file(name)) as file, io.BufferedReader(file) as stream:
                    stream.seek(begin)
                    return stream.read(end - begin)
            return self._range(name, begin, end)

    def size(self, name: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            NotFound: the object does not exist.
        """
        return self.stamp(name)[0]

    def exists(self, name: str) -> bool:
        with self._reported("look up", name):
            return self._file(name).exists() if self.is_local else self._request("exists", self._key(name))

    def names(self) -> list[str]:
        """Return the sorted names of objects and directories directly in this directory; empty if it does not exist."""
        with self._reported("list", ""):
            try:
                entries = os.listdir(self._root) if self.is_local else self._request("ls", self._root, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = {path.rstrip("/").rsplit("/", 1)[-1] for path in entries}
            return sorted(name for name in names if not name.startswith("."))

    def tree(self) -> list[str]:
        """Names of all objects below, relative, sorted."""
        with self._reported("list", ""):
            if self.is_local:
                return disk.tree(self._root)
            root = self._root.rstrip("/") + "/"
            return sorted({path.removeprefix(root) for path in self._request("find", self._root)})

    def cut_off_writes(self, names: Iterable[str], seconds: float) -> list[str]:
        """Return the listed names that are temporary files of writes and have not changed for so long, by the store's
        clock. Buckets do not have such files."""
        temporary = [name for name in names if disk.is_temporary(name)]
        if not temporary or not self.is_local:
            return temporary
        with self._reported("look for temporary files in", ""):
            return disk.unchanged_since(self._root, temporary, seconds)

    def delete(self, name: str) -> None:
        """Delete one object; nothing happens when it is not there."""
        self.delete_object(_checked(name))

    def delete_object(self, listed: str) -> None:
        """Delete an object by a name that `tree` listed; unlike other names, it may begin with a dot."""
        if ".." in listed.split("/") or listed.startswith("/"):
            raise StoreError(f"{listed!r} lies outside {self.uri}.")
        with self._reported("delete", listed):
            if self.is_local:
                disk.inside(self._root, listed).unlink(missing_ok=True)
            elif self._request("exists", f"{self._root}/{listed}"):
                self._request("rm_file", f"{self._root}/{listed}")

    def delete_tree(self) -> None:
        """Delete everything below and the directory itself."""
        with self._reported("delete", ""):
            if self.is_local:
                disk.delete_tree(self._root)
            elif self._request("exists", self._root):
                self._request("rm", self._root, recursive=True)

    def download(self, names: list[str], directory: Path) -> None:
        """Copy objects to a local directory, keeping their relative names.

        It is for directories that a person named, such as a model in a cache of links: those are followed wherever they lead.
        """
        for name in names:
            target = directory / _checked(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._reported("download", name), disk.naming(target):
                if self.is_local:
                    shutil.copyfile(f"{self._root}/{name}", target)
                else:
                    self._request("get_file", self._key(name), str(target))

    def _key(self, name: str) -> str:
        return f"{self._root}/{_checked(name)}"

    def _file(self, name: str) -> Path:
        return disk.inside(self._root, _checked(name))

    def _range(self, name: str, begin: int, end: int) -> bytes:
        """Return a range of an object in a bucket; empty after its end."""
        try:
            return self._request("cat_file", self._key(name), start=begin, end=end)
        except OSError as error:
            if bucket.code_of(error) == "InvalidRange":
                return b""
            raise

    def _request(self, operation: str, *arguments: Any, **options: Any) -> Any:
        work = getattr(self._fs, operation)
        with waiting.counted():
            return bucket.answered(self._fs, lambda seconds: work(*arguments, timeout=seconds, **options))

    @contextmanager
    def _reported(self, verb: str, name: str) -> Iterator[None]:
        """Convert a failure into a StoreError that names the object and the remedy."""
        place = f"{self.uri}/{name}" if name else self.uri
        try:
            with waiting.counted() if self.is_local else nullcontext():
                yield
        except StoreUnavailable as error:
            raise StoreUnavailable(f"cannot {verb} {place}: {masked_text(str(error))}.") from error
        except StoreError:
            raise
        except FileNotFoundError as error:
            if not self.is_local and bucket.code_of(error) == "NoSuchBucket":
                name, where = self._root.split("/", 1)[0], bucket.endpoint() or "AWS's own endpoint"
                raise NoBucket(
                    f"cannot {verb} {place}: bucket {name!r} does not exist at {where}. Create it, or correct `store`."
                ) from error
            raise NotFound(f"cannot {verb} {place}: it does not exist") from error
        except FileExistsError as error:
            raise AlreadyExists(f"cannot {verb} {place}: it exists already") from error
        except PermissionError as error:
            remedy = "Check owner, credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), policy."
            code = "" if self.is_local else bucket.code_of(error)
            if code and bucket.is_clock_wrong(error):
                remedy = "This machine's clock differs from the bucket's by more than it accepts: set the clock."
            reason = f" ({code})" if code.isalpha() else ""
            raise StoreError(f"cannot {verb} {place}: permission denied{reason}. {remedy}") from error
        except OSError as error:
            if error.errno in disk.NO_ROOM:
                raise DiskFull(
                    f"cannot {verb} {place}: {error}. The disk is full: free space and start again."
                ) from error
            if error.errno == errno.EROFS:
                raise StoreError(
                    f"cannot {verb} {place}: its file system is read-only. Mount it writable, or name another store (--store, "
                    "ROUNDHOUSE_STORE, the key store)."
                ) from error
            if not self.is_local and bucket.is_redirected(error):
                raise StoreError(
                    f"cannot {verb} {place}: the bucket is in another region. Set AWS_DEFAULT_REGION to this region, and "
                    "AWS_ENDPOINT_URL, if it is set, to the service there."
                ) from error
            raise StoreError(f"cannot {verb} {place}: {masked_text(str(error))}.") from error


def is_name(text: str) -> bool:
    """Return whether this is a valid name of a directory entry in the store."""
    return _SAFE_NAME.fullmatch(text) is not None and "/" not in text and len(text) <= _LONGEST_PART


def _checked(name: str) -> str:
    if _SAFE_NAME.fullmatch(name) is None:
        raise StoreError(f"{name[:200]!r} is not a name for the store: use letters, digits, dots, dashes, underscores.")
    if len(name) > _LONGEST_NAME or max(map(len, name.split("/"))) > _LONGEST_PART:
        raise StoreError(
            f"{name[:40]!r}… is too long a name for the store: {_LONGEST_PART} characters a part, {_LONGEST_NAME} in all."
        )
    return name
