"""How a checkpoint's weights are offered to the replicas of a run's engine: put into memory, sent, as a delta, as an adapter.

Invariant: an offer names the digest of what the engine is to hold, computed here from the checkpoint; what replicas load has
that digest or is not loaded. Where a shorter way cannot be offered (nobody holds a base, the run is a fork with another base),
the checkpoint is.

    <store>/runs/<run>/deltas/000012-from-1a2b…-3c4d…/     the two newest are kept
"""

from __future__ import annotations

import atexit
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from roundhouse.config.generation import inflight_requests
from roundhouse.errors import ConfigError, DataError, DiskFull, StoreError
from roundhouse.generation.deployment import ReplicaStatus
from roundhouse.generation.terms import RefitOptions
from roundhouse.stages.checkpoint import TRAINER, WEIGHTS_DIGEST
from roundhouse.stages.policy import checkpoint_cache
from roundhouse.store.location import Location
from roundhouse.store.manifest import Reference, model_location
from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest
from roundhouse.weight_sync.adapter import ADAPTER_FILE
from roundhouse.weight_sync.base import AdapterWay, DeltaWay, Dtype, SharedMemoryWay, StoreWay, Way, fetch, retyped
from roundhouse.weight_sync.cache import CacheEntry, NodeCache, private_directory
from roundhouse.weight_sync.delta import write_delta
from roundhouse.weight_sync.delta_index import DELTA
from roundhouse.weight_sync.gloo import own_address
from roundhouse.weight_sync.retype import retype
from roundhouse.weight_sync.tensor_digest import digest_of_tensors, tensor_digests
from roundhouse.weight_sync.tensor_file import weight_files
from roundhouse.weight_sync.transfer import Sender

MEMORY = Path("/dev/shm")
KEPT_DELTAS = 2
TRANSFER_SHARE = 0.25
"""Of a refit's time limit: what a transfer's meeting may take, and each of its batches. Some is left for reading the checkpoint
where it fails."""
_DELTA = re.compile(r"(\d{6})-from-[0-9a-f]{12}-[0-9a-f]{12}")

_in_memory: dict[str, CacheEntry] = {}
"""What this process keeps in the node's memory, by run."""


@contextmanager
def offered(
    run: Run, checkpoint: Reference, replicas: Sequence[ReplicaStatus], engine_url: str | None = None
) -> Iterator[RefitOptions]:
    """The options of a refit to this checkpoint, valid until the context is left.

    Args:
        replicas: as they are now; a delta starts from what most of them hold, a transfer is to them alone.
        engine_url: where they are; a transfer comes from this machine's address on the way there.

    Raises:
        ConfigError: this process cannot send by the backend that was chosen.
        DataError, StoreError, OSError: the checkpoint cannot be read.
        DiskFull: it does not fit this node's memory.
    """
    generation = run.config.generation
    running, keep = inflight_requests(run.config), generation.keep_prefix_cache
    if generation.weight_sync == "store":
        digest = read_manifest(checkpoint).details.get(WEIGHTS_DIGEST)
        yield RefitOptions(digest, None, running, keep)
        return
    offer = _Offer(run, checkpoint)
    if generation.weight_sync == "shared-memory":
        digest, way, entry = offer.in_memory()
        before = _in_memory.pop(run.uid, None)
        _in_memory[run.uid] = entry
        try:
            yield RefitOptions(digest, way.model_dump(), running, keep)
        finally:
            if before is not None:
                before.release()
            offer.memory.evict()
        return
    directory, held = offer.as_held(checkpoint.uri)
    try:
        digest = _digest(directory)
        if (
            generation.weight_sync == "transfer"
            and (sender := offer.sender(directory, replicas, engine_url)) is not None
        ):
            with sender:
                yield RefitOptions(digest, sender.way(offer.dtype).model_dump(), running, keep)
            return
        shorter = offer.shorter(directory, digest, replicas)
        yield RefitOptions(digest, (shorter or StoreWay(dtype=offer.dtype)).model_dump(), running, keep)
    finally:
        if held is not None:
            held.release()


def leave_memory() -> None:
    """Give back this node's memory that weights of this process take."""
    if not _in_memory:
        return
    for entry in _in_memory.values():
        entry.release()
    _in_memory.clear()
    _memory().evict()


atexit.register(leave_memory)


class _Offer:
    """Of one checkpoint of a run."""

    def __init__(self, run: Run, checkpoint: Reference) -> None:
        self.run, self.checkpoint = run, checkpoint
        self.dtype: Dtype = run.config.generation.dtype
        bound = int(run.config.generation.weights_cache_gib * 2**30)
        self.cache = NodeCache(checkpoint_cache(run.config).resolve() / "weights", bound)
        self.memory = _memory()

    def as_held(self, uri: str) -> tuple[Path, CacheEntry | None]:
        """A checkpoint's weights in the engine's format, on this node."""
        return retyped(uri, self.dtype, self.cache)

    def in_memory(self) -> tuple[str, Way, CacheEntry]:
        directory, held = fetch(self.checkpoint.uri, self.cache)
        try:
            key = f"{self.run.uid}-{self.checkpoint.policy_version:06d}-{self.checkpoint.digest[:12]}-{self.dtype}"
            entry = self.memory.entry(key, lambda partial: retype(directory, partial, self.dtype))
        except OSError as error:
            raise DiskFull(
                f"Version {self.checkpoint.policy_version} does not fit into {MEMORY}: {error}. Give the node's shared memory "
                "room for two versions, or set generation.weight_sync to store."
            ) from error
        finally:
            if held is not None:
                held.release()
        return _digest(entry.path), SharedMemoryWay(dtype=self.dtype, path=str(entry.path)), entry

    def delta(self, directory: Path, digest: str, replicas: Sequence[ReplicaStatus]) -> Way | None:
        """None: no replica holds other weights of which a checkpoint is left."""
        bases = Counter(
            (one.digest, one.weights) for one in replicas if (one.ready or one.asleep) and one.digest and one.weights
        )
        if not bases:
            return None
        (base_digest, base_uri), _ = bases.most_common(1)[0]
        assert base_digest is not None
        assert base_uri is not None
        if base_digest == digest:
            return None
        try:
            base, held = self.as_held(base_uri)
        except (DataError, StoreError, OSError):
            return None  # retention was quicker
        try:
            if _digest(base) != base_digest:
                return None
            deltas = self.run.location / "deltas"
            version = self.checkpoint.policy_version
            place = deltas / f"{version:06d}-from-{_short(base_digest)}-{_short(digest)}"
            if not place.exists(DELTA):
                write_delta(base, directory, place, side_files=False)
        finally:
            if held is not None:
                held.release()
        named = sorted(name for name in deltas.names() if _DELTA.fullmatch(name))
        for old in named[:-KEPT_DELTAS]:
            (deltas / old).delete_tree()
        return DeltaWay(dtype=self.dtype, base=base_digest, uri=place.uri)

    def sender(self, directory: Path, replicas: Sequence[ReplicaStatus], engine_url: str | None) -> Sender | None:
        """None: there is no replica that holds weights, or slept, to send to."""
        generation = self.run.config.generation
        if generation.transfer_backend == "nccl":
            _require_gpu()
        there = [one.replica_id for one in replicas if one.ready or one.asleep]
        if not there or engine_url is None:
            return None
        parts = urlsplit(engine_url)
        address = own_address(parts.hostname or "127.0.0.1", parts.port or 80)
        seconds = TRANSFER_SHARE * generation.refit_timeout_seconds
        return Sender(directory, generation.transfer_backend, there, address, seconds)

    def shorter(self, directory: Path, digest: str, replicas: Sequence[ReplicaStatus]) -> Way | None:
        """None: there is nothing shorter than the checkpoint."""
        match self.run.config.generation.weight_sync:
            case "delta":
                return self.delta(directory, digest, replicas)
            case "adapter":
                return self.adapter()
            case _:
                return None

    def adapter(self) -> Way | None:
        """None: the checkpoint has none (it is the starting policy), or the run is a fork, whose base is its parent's."""
        start = self.run.checkpoint(0).reference()
        names = read_manifest(self.checkpoint).model_files.by_name()
        if start is None or self.run.parent is not None or f"{TRAINER}/{ADAPTER_FILE}" not in names:
            return None
        return AdapterWay(
            dtype=self.dtype, base=start.uri, uri=(model_location(Location(self.checkpoint.uri)) / TRAINER).uri
        )


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "generation.transfer_backend is nccl, which sends from a GPU, and the process that refits has none. Set it to gloo."
        )


def _memory() -> NodeCache:
    if not MEMORY.is_dir():
        raise ConfigError(
            f"generation.weight_sync is shared-memory, and this machine has no {MEMORY}. Set it to store."
        )
    return NodeCache(private_directory(MEMORY, "roundhouse-weights"), 0)


def _digest(directory: Path) -> str:
    return digest_of_tensors(tensor_digests(weight_files(directory)))


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
