"""A node's cache of weights: directories by key, made once for all processes of the node, bounded in size.

Invariants: a named entry is whole, because it is made elsewhere and renamed. Of several processes that want an entry
one makes it and the others wait. An entry in use is never deleted; unused entries take at most `max_bytes`, the newest
used. Locks are kernel locks (flock), so a process that dies leaves only its unfinished directory and a lock's file; the
next process of this machine that makes or evicts an entry removes them. If machines share a directory without shared
locks, remains are removed after `WAIT_SECONDS` without a change.

    cache = NodeCache(directory, max_bytes)
    entry = cache.entry("a1b2…", fill)     # fill(partial) makes the content; held until entry.release()
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from roundhouse.errors import StoreError
from roundhouse.store.process_identity import boot_id

WAIT_SECONDS = 1800.0
"""Longest wait for another process of the node that makes the same entry."""
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class CacheEntry:
    """A directory of the cache, kept from deletion until `release`."""

    path: Path
    _lock: int | None

    def release(self) -> None:
        """May be called again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class NodeCache:
    """See the module's docstring. `directory` must be writable by this user alone (`private_directory`)."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes

    def entry(self, key: str, fill: Callable[[Path], None]) -> CacheEntry:
        """Return the entry; if it is missing, `fill` makes it in an empty directory.

        Raises:
            StoreError: another process has been making it for `WAIT_SECONDS`. Exceptions of `fill` pass through.
        """
        final = self.directory / key
        while True:
            if (entry := self.held(key)) is not None:
                return entry
            with self._alone(key) as alone:
                if alone and not final.is_dir():
                    self._clear_dead(key)
                    self.evict()  # first, since the room may be needed
                    partial = self._partial(key)
                    partial.mkdir(parents=True)
                    try:
                        fill(partial)
                        try:
                            partial.rename(final)
                        except OSError:
                            if not final.is_dir():  # else a machine with a lock that is not visible here was faster
                                raise
                    finally:
                        shutil.rmtree(partial, ignore_errors=True)
            # The lock was let go for a moment, in which the entry can have been evicted: look again.

    def held(self, key: str) -> CacheEntry | None:
        """The entry, if it is there."""
        final = self.directory / key
        if not final.is_dir():
            return None
        lock = self._lock(key, fcntl.LOCK_SH)
        if lock is None:
            return None
        if not final.is_dir():
            os.close(lock)
            return None
        os.utime(final)
        return CacheEntry(final, lock)

    def evict(self) -> None:
        """Delete the remains of dead processes, then unused entries, longest unused first, until the rest is within
        the bound."""
        self._clear_unfinished()
        entries = []
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):  # another process deleted it
                if not path.name.startswith("."):
                    entries.append((path.stat().st_mtime, path))
        total = 0
        for _, path in sorted(entries, reverse=True):
            size = 0
            for file in path.rglob("*"):
                with suppress(FileNotFoundError):
                    size += file.lstat().st_size
            total += size
            if total <= self.max_bytes or (lock := self._lock(path.name, fcntl.LOCK_EX)) is None:
                continue
            try:
                doomed = self._partial(path.name)
                with suppress(FileNotFoundError):
                    path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
                self._lock_file(path.name).unlink(missing_ok=True)
            finally:
                os.close(lock)
            total -= size

    def _clear_unfinished(self) -> None:
        """Delete incomplete entries that no process makes: a process holds an entry's lock while it makes or deletes
        it."""
        for lock_file in self.directory.glob(".*.lock"):
            key = lock_file.name[1 : -len(".lock")]
            if (self.directory / key).is_dir() or (lock := self._lock(key, fcntl.LOCK_EX)) is None:
                continue
            try:
                count, dead = self._clear_dead(key)
                if count == dead and (dead or _is_old(lock_file)):
                    lock_file.unlink(missing_ok=True)
            finally:
                os.close(lock)

    def _clear_dead(self, key: str) -> tuple[int, int]:
        """Delete incomplete remains of an entry that this process has locked, and return how many existed and how many
        were deleted. Another machine's lock may not be visible here, so its remains must be old, too."""
        remains = list(self.directory.glob(f".{key}.partial-*"))
        dead = [left for left in remains if left.match(self._partial(key, "*").name) or _is_old(left)]
        for left in dead:
            shutil.rmtree(left, ignore_errors=True)
        return len(remains), len(dead)

    @contextmanager
    def _alone(self, key: str) -> Iterator[bool]:
        """Hold the entry's lock alone; False if another process made the entry meanwhile."""
        self.directory.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + WAIT_SECONDS
        while (lock := self._lock(key, fcntl.LOCK_EX)) is None:
            if (self.directory / key).is_dir():
                yield False
                return
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{self.directory / key} is being made by another process for {WAIT_SECONDS:g} s. Look for a stuck replica."
                )
            time.sleep(_POLL_SECONDS)
        try:
            yield True
        finally:
            os.close(lock)
            self.evict_beyond(key)

    def evict_beyond(self, key: str) -> None:
        """Evict, but not the entry that was just made."""
        if (entry := self.held(key)) is not None:
            try:
                self.evict()
            finally:
                entry.release()

    def _partial(self, key: str, name: str | None = None) -> Path:
        """Return the path at which an entry is made or deleted; the name identifies the machine and its boot."""
        return self.directory / f".{key}.partial-{boot_id()}-{name or uuid.uuid4().hex}"

    def _lock_file(self, key: str) -> Path:
        return self.directory / f".{key}.lock"

    def _lock(self, key: str, kind: int) -> int | None:
        """Lock the entry; None if it is locked. The lock's file may be deleted with its entry, so only a lock on the
        file of the present name counts."""
        path = self._lock_file(key)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                here = os.stat(path)
                if os.path.samestat(here, os.fstat(descriptor)):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except FileNotFoundError:
                pass
            os.close(descriptor)


def _is_old(path: Path) -> bool:
    """Return whether nothing in it has changed for `WAIT_SECONDS`. The modification time is not used, because copies
    keep it."""
    newest = 0.0
    for place in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            newest = max(newest, place.lstat().st_ctime)
    return time.time() - newest > WAIT_SECONDS


def private_directory(parent: Path, name: str) -> Path:
    """Return a directory that only this user can write to: others could place foreign weights in a shared one.

    Raises:
        StoreError: it belongs to another user.
    """
    directory = parent / f"{name}-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid():
        raise StoreError(f"{directory} belongs to another user. Set TMPDIR to a directory that you own.")
    directory.chmod(0o700)
    return directory


def node_cache(max_bytes: int) -> NodeCache:
    """The cache that all replicas of this user on this node share."""
    return NodeCache(private_directory(Path(tempfile.gettempdir()), "roundhouse-weights"), max_bytes)


def entry_key(*parts: str | None) -> str:
    """The name of an entry that is made of these."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]
