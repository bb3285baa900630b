"""How new weights come to a node: the checkpoint itself, or a shorter way to the same bytes.

Invariant: whatever the way, what is handed on is a local directory whose tensors have the wanted digest. The checkpoint is the
truth and the way a shortcut: where a way is barred (a replica that has just started holds no base, shared memory is another
node's, a delta was deleted or damaged), the checkpoint is read instead, and the note says why.

    store          the files of the checkpoint; from a bucket in parallel ranges, once a node
    shared-memory  files that were put into this node's memory, as the engine holds them
    delta          what changed since the weights that this replica holds
    adapter        the checkpoint of the base, once a node, and the adapter
    transfer       from one process straight into the engine (`transfer`), past this module; here it is the checkpoint
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from roundhouse.errors import DataError, InfraError, StoreError
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import MANIFEST, Manifest, model_location
from roundhouse.weight_sync import adapter, ranged
from roundhouse.weight_sync.cache import CacheEntry, NodeCache
from roundhouse.weight_sync.delta import apply_delta
from roundhouse.weight_sync.retype import needs_retyping, retype
from roundhouse.weight_sync.tensor_digest import digest_of_tensors, tensor_digests
from roundhouse.weight_sync.tensor_file import weight_files

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]


class _Way(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype
    """What the engine holds, and what the digest is of."""


class StoreWay(_Way):
    """The checkpoint, in the engine's format: what later deltas start from."""

    kind: Literal["store"] = "store"


class SharedMemoryWay(_Way):
    kind: Literal["shared-memory"] = "shared-memory"
    path: str
    """Directory in this node's memory."""


class DeltaWay(_Way):
    kind: Literal["delta"] = "delta"
    base: str
    """Digest of the weights that it starts from."""
    uri: str


class AdapterWay(_Way):
    kind: Literal["adapter"] = "adapter"
    base: str
    """URI of the checkpoint that the adapter is for."""
    uri: str
    """URI of the adapter's directory."""


class TransferWay(_Way):
    kind: Literal["transfer"] = "transfer"
    address: str
    """Of the sender, as replicas reach it."""
    port: int
    key: str
    """What the meeting's keys begin with."""
    replicas: list[str]
    """Ids of those that were there when the weights were offered; the sender expects no other."""
    seconds: float
    """Time limit of the meeting, and of each batch."""


Way = Annotated[StoreWay | SharedMemoryWay | DeltaWay | AdapterWay | TransferWay, Field(discriminator="kind")]
_WAYS: TypeAdapter[Way] = TypeAdapter(Way)


def parse_way(given: dict[str, Any] | None) -> Way | None:
    """A way as it stands in a wish; None is the checkpoint's files as they are.

    Raises:
        ValueError: it is none of those known here.
    """
    try:
        return None if given is None else _WAYS.validate_python(given)
    except ValidationError as error:
        raise ValueError(f"way is {given!r}: {error}") from None


@dataclass(slots=True)
class FetchedWeights:
    """Weights on this node, proved."""

    directory: Path | None
    """None: they came past every file."""
    digest: str
    """`digest_of_tensors` of all of them."""
    tensors: int
    way: str
    note: str | None = None
    """Why it is not the way that was wanted."""
    seconds: dict[str, float] = field(default_factory=dict)
    entry: CacheEntry | None = None

    def release(self) -> None:
        """The engine does not read them any more."""
        if self.entry is not None:
            self.entry.release()


def bring(
    uri: str, way: Way | None, digest: str | None, cache: NodeCache, held: FetchedWeights | None = None
) -> FetchedWeights:
    """The weights of the checkpoint at `uri`, here.

    Args:
        digest: of the tensors that are wanted; None takes what the checkpoint's manifest vouches for.
        held: what this replica holds now.

    Raises:
        DataError: the checkpoint is missing, damaged, or has other tensors than wanted.
        StoreError, OSError: the store cannot be reached; trying again may help.
    """
    note = None
    if way is not None and not isinstance(way, StoreWay | TransferWay):
        try:
            return _proved(way.kind, digest, *_shortcut(way, digest, cache, held))
        except (DataError, StoreError, OSError) as error:
            note = f"{way.kind}: {error}"
            logger.warning("%s comes whole, not by %s", uri, note)
    started = time.perf_counter()
    directory, entry = fetch(uri, cache)
    if way is not None and needs_retyping(directory, way.dtype):
        directory, entry = _retyped(directory, entry, way.dtype, cache)
    weights = _proved("store", digest, directory, entry, started)
    weights.note = note
    return weights


def _proved(way: str, digest: str | None, directory: Path, entry: CacheEntry | None, started: float) -> FetchedWeights:
    brought = time.perf_counter()
    try:
        digests = tensor_digests(weight_files(directory))
        found = digest_of_tensors(digests)
        if digest is not None and found != digest:
            raise DataError(f"The weights in {directory} have digest {found}, wanted was {digest}.")
    except BaseException:
        if entry is not None:
            entry.release()
        raise
    seconds = {"bring": brought - started, "digest": time.perf_counter() - brought}
    return FetchedWeights(directory, found, len(digests), way, seconds=seconds, entry=entry)


def _shortcut(
    way: SharedMemoryWay | DeltaWay | AdapterWay, digest: str | None, cache: NodeCache, held: FetchedWeights | None
) -> tuple[Path, CacheEntry | None, float]:
    started = time.perf_counter()
    if isinstance(way, SharedMemoryWay):
        path = Path(way.path)
        if not path.is_dir():
            raise StoreError(f"{path} is not in this node's memory")
        return path, None, started
    entry = _by_delta(way, digest, cache, held) if isinstance(way, DeltaWay) else _by_adapter(way, cache)
    return entry.path, entry, started


def _by_delta(way: DeltaWay, digest: str | None, cache: NodeCache, held: FetchedWeights | None) -> CacheEntry:
    if held is None or held.digest != way.base:
        holds = "nothing" if held is None else held.digest
        raise DataError(f"it starts from {way.base}, this replica holds {holds}")
    if held.directory is None:
        raise DataError("it starts from weights in a file, those of this replica came without")
    base = held.directory

    def fill(partial: Path) -> None:
        apply_delta(base, Location(way.uri), partial / "whole")
        for path in (partial / "whole").iterdir():
            path.rename(partial / path.name)
        (partial / "whole").rmdir()

    return cache.entry(_key("delta", way.base, way.uri, digest), fill)


def _by_adapter(way: AdapterWay, cache: NodeCache) -> CacheEntry:
    location = Location(way.uri)
    names = (adapter.ADAPTER_FILE, adapter.ADAPTER_CONFIG)
    contents = {name: location.read(name) for name in names}
    marks = [hashlib.sha256(data).hexdigest() for data in contents.values()]

    def fill(partial: Path) -> None:
        base, held = fetch(way.base, cache)
        try:
            own = partial / "adapter"
            own.mkdir()
            for name, data in contents.items():
                (own / name).write_bytes(data)
            adapter.merge(base, own, partial, way.dtype)
            for name in names:
                (own / name).unlink()
            own.rmdir()
        finally:
            if held is not None:
                held.release()

    return cache.entry(_key("adapter", way.base, way.dtype, *marks), fill)


def retyped(uri: str, dtype: str, cache: NodeCache) -> tuple[Path, CacheEntry | None]:
    """A checkpoint's weights as an engine of this dtype holds them."""
    directory, entry = fetch(uri, cache)
    return _retyped(directory, entry, dtype, cache) if needs_retyping(directory, dtype) else (directory, entry)


def _retyped(directory: Path, entry: CacheEntry | None, dtype: str, cache: NodeCache) -> tuple[Path, CacheEntry | None]:
    try:
        marks = [f"{path}:{path.stat().st_mtime_ns}:{path.stat().st_size}" for path in weight_files(directory)]
        made = cache.entry(_key("retyped", dtype, *marks), lambda partial: retype(directory, partial, dtype))
    finally:
        if entry is not None:
            entry.release()
    return made.path, made


def fetch(uri: str, cache: NodeCache) -> tuple[Path, CacheEntry | None]:
    """A local directory with the checkpoint's weights; of a remote one, held in the cache.

    Raises:
        DataError: there are no safetensors, or they are not what the manifest says.
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


def local_path(uri: str) -> Path | None:
    """The path of a local directory (plain or file://), None when the URI is remote."""
    if uri.startswith("file://"):
        return Path(uri[len("file://") :])
    return None if "://" in uri else Path(uri)


def _downloaded(uri: str, cache: NodeCache) -> CacheEntry:
    """Where there is a manifest, it tells the files and their digests, since a bucket's listing may be late; and a run that was
    deleted and begun again under the same id is another one. Elsewhere the listing has to do."""
    source = Location(uri)
    manifest = _manifest(source)
    files: dict[str, tuple[int, str | None]]
    if manifest is None:
        files = {name: (source.size(name), None) for name in source.names() if _is_weights(name)}
    else:
        source = source / manifest.directory if manifest.directory else source
        named = manifest.model_files.by_name()
        files = {name: (entry.size, entry.sha256) for name, entry in named.items() if _is_weights(name)}
    if not any(name.endswith(".safetensors") for name in files):
        raise DataError(f"There are no safetensors files at {uri}.")

    def fill(partial: Path) -> None:
        ranged.download(source, {name: size for name, (size, _) in files.items()}, partial)
        for name, (_, digest) in files.items():
            if digest is not None and _sha256(partial / name) != digest:
                raise DataError(f"{uri}/{name} is not what its manifest says. Restore it.")

    return cache.entry(_key(uri, str(manifest)), fill)


def _manifest(source: Location) -> Manifest | None:
    try:
        return Manifest.model_validate_json(source.read(MANIFEST))
    except NotFound:
        return None
    except ValueError as error:
        raise DataError(f"{source.uri}/{MANIFEST} is not a manifest: {error}") from error


def _is_weights(name: str) -> bool:
    return "/" not in name and name.endswith((".safetensors", ".json"))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _key(*parts: str | None) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]
