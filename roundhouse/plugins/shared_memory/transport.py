"""The transport `shared-memory`: weights are copied once into this node's memory, in the engine's format, and replicas
map them.

Invariant: one version of a run is in memory, two during a refit. The memory is released when the refitting process
ends; the next user of this transport removes a killed one's memory.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, DiskFull, StoreError
from roundhouse.weight_sync.base import FetchRequest, Published, RunCheckpoint, WeightSource, WeightTransport
from roundhouse.weight_sync.cache import CacheEntry, NodeCache, private_directory
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import digest_of, retype

MEMORY = Path("/dev/shm")

_in_memory: dict[str, CacheEntry] = {}
"""Entries of this process in the node's memory, by run."""


class SharedMemorySource(WeightSource):
    kind: str = "shared-memory"
    path: str
    """Directory in the memory of the node of the process that refits."""


class SharedMemoryTransport(WeightTransport):
    """Flow and engine share a node."""

    Source = SharedMemorySource

    def check(self, run: RunConfig) -> None:
        if not run.infra.runs_here:
            raise ValueError(
                f"generation.weight_sync is shared-memory, but with infra.kind {run.infra.kind} flow and engine are in "
                "separate pods. Set it to store or delta."
            )

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        """Raises:
        DiskFull: it does not fit this node's memory.
        """
        memory, uid = _memory(), checkpoint.run.uid
        entry = _put(checkpoint, memory)
        before = _in_memory.pop(uid, None)
        _in_memory[uid] = entry
        try:
            yield Published(digest_of(entry.path), SharedMemorySource(dtype=checkpoint.dtype, path=str(entry.path)))
        finally:
            if before is not None:
                before.release()
            memory.evict()

    @classmethod
    def fetch(cls, source: SharedMemorySource, request: FetchRequest) -> tuple[Path, CacheEntry | None]:
        path = Path(source.path)
        if not path.is_dir():
            raise StoreError(f"{path} is not in this node's memory")
        return path, None


def release_memory() -> None:
    """Release this node's memory that weights of this process take."""
    if not _in_memory:
        return
    for entry in _in_memory.values():
        entry.release()
    _in_memory.clear()
    _memory().evict()


atexit.register(release_memory)


def _put(checkpoint: RunCheckpoint, memory: NodeCache) -> CacheEntry:
    reference, dtype = checkpoint.reference, checkpoint.dtype
    directory, entry = fetch_checkpoint(reference.uri, checkpoint.cache)
    try:
        key = f"{checkpoint.run.uid}-{reference.policy_version:06d}-{reference.digest[:12]}-{dtype}"
        return memory.entry(key, lambda partial: retype(directory, partial, dtype))
    except OSError as error:
        raise DiskFull(
            f"Version {reference.policy_version} does not fit into {MEMORY}: {error}. Give the node's shared memory room "
            "for two versions, or set generation.weight_sync to store."
        ) from error
    finally:
        if entry is not None:
            entry.release()


def _memory() -> NodeCache:
    if not MEMORY.is_dir():
        raise ConfigError(f"generation.weight_sync is shared-memory, but this machine lacks {MEMORY}. Set it to store.")
    return NodeCache(private_directory(MEMORY, "roundhouse-weights"), 0)
