"""A directory of the store on a file system or in a bucket, with the few operations that commits are built from.

Contract, the same for file:// and s3://:
* `write` replaces a whole object or leaves it as it was: no reader ever sees half of one.
* `create` succeeds for exactly one of several writers (rename-free link on a file system, If-None-Match on S3); the
  others get `AlreadyExists`.
* `names` is never served from a cache.
* A name cannot leave its directory.
Every failure is a `StoreError` that names the object and, where there is one, the remedy.
"""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from roundhouse.errors import StoreError

_SAFE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._=-]*(/[A-Za-z0-9][A-Za-z0-9._=-]*)*$")


class AlreadyExists(StoreError):
    """Another writer created this object first."""


class NotFound(StoreError):
    """There is no such object."""


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
        self.uri = uri.rstrip("/")
        self.is_local = scheme == "file"
        self._fs = _fs if _fs is not None else _open_filesystem(scheme)
        self._root = self._fs._strip_protocol(self.uri)

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
                target = self._target(name)
                temporary = _write_temporary(target, data)
                os.replace(temporary, target)
                _sync_directory(target.parent)
            else:
                self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> None:
        """Create an object that does not exist yet.

        Raises:
            AlreadyExists: somebody else was first; the object is theirs, unchanged.
        """
        with self._reported("create", name):
            if self.is_local:
                target = self._target(name)
                temporary = _write_temporary(target, data)
                try:
                    os.link(temporary, target)
                finally:
                    temporary.unlink()
                _sync_directory(target.parent)
            else:
                self._create_in_bucket(name, data)

    def _create_in_bucket(self, name: str, data: bytes) -> None:
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            # The client repeats a request whose reply was lost, and then finds the object that it made itself.
            if self.read(name) != data:
                raise

    def read(self, name: str) -> bytes:
        """The whole object.

        Raises:
            NotFound: there is none.
        """
        with self._reported("read", name):
            return self._fs.cat_file(self._path(name))

    def exists(self, name: str) -> bool:
        with self._reported("look up", name):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(name)))

    def names(self) -> list[str]:
        """Names of the objects and directories right below, sorted; empty when there is no such directory."""
        with self._reported("list", ""):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = {path.rstrip("/").rsplit("/", 1)[-1] for path in found}
            return sorted(name for name in names if not name.startswith("."))

    def tree(self) -> list[str]:
        """Names of all objects below, relative, sorted."""
        with self._reported("list", ""):
            self._fs.invalidate_cache()
            root = self._root.rstrip("/") + "/"
            return sorted(path.removeprefix(root) for path in self._fs.find(self._root))

    def delete(self, name: str) -> None:
        """Delete one object; nothing happens when it is not there."""
        with self._reported("delete", name):
            if self._fs.exists(self._path(name)):
                self._fs.rm_file(self._path(name))

    def delete_object(self, listed: str) -> None:
        """Delete an object by a name that `tree` listed; unlike other names, it may begin with a dot."""
        if ".." in listed.split("/") or listed.startswith("/"):
            raise StoreError(f"{listed!r} lies outside {self.uri}.")
        with self._reported("delete", listed):
            if self._fs.exists(f"{self._root}/{listed}"):
                self._fs.rm_file(f"{self._root}/{listed}")

    def delete_tree(self) -> None:
        """Delete everything below and the directory itself."""
        with self._reported("delete", ""):
            if self._fs.exists(self._root):
                self._fs.rm(self._root, recursive=True)

    def download(self, names: list[str], directory: Path) -> None:
        """Copy objects to a local directory, keeping their relative names."""
        for name in names:
            target = directory / _checked(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._reported("download", name):
                self._fs.get_file(self._path(name), str(target))

    def _path(self, name: str) -> str:
        return f"{self._root}/{_checked(name)}"

    def _target(self, name: str) -> Path:
        target = Path(self._path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    @contextmanager
    def _reported(self, verb: str, name: str) -> Iterator[None]:
        """Turn a file system's error into a StoreError that says which object and what to do."""
        place = f"{self.uri}/{name}" if name else self.uri
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise NotFound(f"cannot {verb} {place}: it does not exist") from error
        except FileExistsError as error:
            raise AlreadyExists(f"cannot {verb} {place}: it exists already") from error
        except PermissionError as error:
            raise StoreError(f"cannot {verb} {place}: permission denied. Check owner, credentials, policy.") from error
        except OSError as error:
            remedy = " The disk is full: free space and start again." if error.errno == errno.ENOSPC else ""
            raise StoreError(f"cannot {verb} {place}: {error}.{remedy}") from error


def _open_filesystem(scheme: str) -> Any:
    if scheme == "file":
        return fsspec.filesystem("file")
    return fsspec.filesystem("s3", use_listings_cache=False, default_fill_cache=False)


def _checked(name: str) -> str:
    if not _SAFE_NAME.match(name) or ".." in name.split("/"):
        raise StoreError(f"{name!r} is not a name for the store: use letters, digits, dots, dashes, underscores.")
    return name


def _write_temporary(target: Path, data: bytes) -> Path:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
