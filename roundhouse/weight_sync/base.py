"""Weight transports: how new weights get from a checkpoint into the engine's replicas.

Invariant: with every transport, a replica loads weights with the published digest. The checkpoint is authoritative and
a transport is a shortcut to the same tensors. If it is unavailable (a new replica lacks a base, shared memory is on
another node, a delta was deleted or is damaged), the replica reads the checkpoint, and its note has the reason.

    process that refits   publish(checkpoint, replicas) -> digest and WeightSource     as long as replicas take it
    desired state         the WeightSource as JSON
    replica               fetch(source) -> a directory on its node                     or
                          receive(engine, source), past every file (`DirectTransport`)

A transport is one class, found by the name of its plug-in, or named by a run as `module:Class`. The fallback
`store` is here: it writes nothing and needs no running replica.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse import plugins
from roundhouse.config.generation import CustomWeightSync
from roundhouse.config.section import Section
from roundhouse.errors import ConfigError, DataError, InfraError, StoreError
from roundhouse.store.stage import WEIGHTS_DIGEST, read_manifest

if TYPE_CHECKING:
    from roundhouse.config.generation import InflightRequests
    from roundhouse.config.models import RunConfig
    from roundhouse.store.run import Run
    from roundhouse.store.stage import Reference
    from roundhouse.weight_sync.cache import CacheEntry, NodeCache
    from roundhouse.weight_sync.replica_state import ReplicaReport

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]
CHECKPOINT = "store"
"""Transport that a replica reports after it read the checkpoint."""


class WeightSource(BaseModel):
    """Source from which a replica gets the weights of a checkpoint; transports add fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: str
    """The transport: its name, or `module:Class`."""
    dtype: Dtype
    """Number format that the engine holds, and that the published digest is of."""


def checkpoint_source(dtype: Dtype) -> WeightSource:
    """Return the checkpoint in the engine's format as the source, for a transport without a shortcut."""
    return WeightSource(kind=CHECKPOINT, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Published:
    """Published weights: their digest and source."""

    digest: str | None
    """`digest_of_tensors`; None: the manifest of the checkpoint does not have it."""
    source: WeightSource | None = None
    """None: the checkpoint's files as they are."""


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint that is published, in the process that refits."""

    run: Run
    reference: Reference
    cache: NodeCache
    """Cache of this node."""
    engine_url: str | None = None
    """URL of the replicas."""
    trainer: object | None = None
    """The train service that holds exactly these weights and does nothing else meanwhile; None: none does."""

    @property
    def dtype(self) -> Dtype:
        return self.run.config.generation.dtype

    @property
    def weights_digest(self) -> str | None:
        """Return `digest_of_tensors` from the checkpoint's manifest; None if it is missing there."""
        digest: str | None = read_manifest(self.reference).details.get(WEIGHTS_DIGEST)
        return digest

    @contextmanager
    def in_engine_format(self, uri: str | None = None) -> Iterator[Path]:
        """The weights of this checkpoint (or of the one at `uri`) as the engine holds them, on this node."""
        from roundhouse.weight_sync.checkpoint_files import fetch_in_dtype

        directory, entry = fetch_in_dtype(uri or self.reference.uri, self.dtype, self.cache)
        try:
            yield directory
        finally:
            if entry is not None:
                entry.release()


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Weights that a replica has to fetch, and weights that it holds."""

    uri: str
    """URI of the checkpoint."""
    digest: str | None
    cache: NodeCache
    """Cache of the replica's node."""
    current: FetchedWeights | None = None
    """Weights that the replica holds now."""


@dataclass(slots=True)
class FetchedWeights:
    """Weights that a replica has, proved by their digest."""

    directory: Path | None
    """None: they came past every file."""
    digest: str
    """`digest_of_tensors` of all of them."""
    tensors: int
    transport: str
    note: str | None = None
    """Why it is not the transport that was published."""
    seconds: dict[str, float] = field(default_factory=dict)
    entry: CacheEntry | None = None

    def release(self) -> None:
        """The engine does not read them any more."""
        if self.entry is not None:
            self.entry.release()


@dataclass(frozen=True, slots=True)
class WeightChange:
    """State of an engine's weight change; see `Engine.load_weights`."""

    version: int
    digest: str | None
    running: InflightRequests
    keep_prefix_cache: bool


class WeightTransferFailed(InfraError):
    """Weights did not come by a direct transport; the engine can still load others."""

    def __init__(self, text: str, *, touched: bool) -> None:
        super().__init__(text)
        self.touched = touched
        """Whether the engine holds a mixture and all earlier generations have ended."""


class WeightTransport(ABC):
    """One way for weights to reach replicas. Subclass it, and name the class in a run: docs/weights.md has an example.

    An instance runs `check` and `publish` in the process that refits; `fetch` runs in a replica, which has only the source.
    """

    Config: ClassVar[type[Section]] = Section
    """Its section of the configuration."""
    Source: ClassVar[type[WeightSource]] = WeightSource
    """Type of the source that its replicas receive."""
    asks_replicas: ClassVar[bool] = False
    """Whether `publish` reads the replicas' state; otherwise replicas are not asked."""
    asks_trainer: ClassVar[bool] = False
    """Whether `publish` may use the trainer that holds the weights; otherwise the trainer continues its work."""
    all_replicas_at_once: ClassVar[bool] = False
    """Whether replicas have to refit concurrently; otherwise Ray Serve changes a fifth of them at a time."""
    publishes_engine_format: ClassVar[bool] = True
    """Whether the published digest is of the weights in the engine's number format, or of the checkpoint's tensors."""

    def __init__(self, config: Section, kind: str) -> None:
        self.config = config
        self.kind = kind

    def check(self, run: RunConfig) -> None:
        """Refuse a run in which the transport cannot work.

        Raises:
            ValueError: names key, value and remedy.
        """

    @abstractmethod
    def publish(
        self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]
    ) -> AbstractContextManager[Published]:
        """Make a checkpoint's weights available to replicas, until the context is left.

        Args:
            replicas: as they are now; empty unless `asks_replicas`.

        Raises:
            ConfigError: this process cannot publish as it was configured.
            DataError, StoreError, OSError: the checkpoint cannot be read.
        """

    @classmethod
    def fetch(cls, source: Any, request: FetchRequest) -> tuple[Path, CacheEntry | None] | None:
        """A directory of this node with the weights, and its entry of the cache; None: the checkpoint is to be read.

        Args:
            source: a `Source` of this class.

        Raises:
            DataError, StoreError, OSError: it is unavailable here, and the checkpoint is read instead.
        """
        return None


class DirectTransport(WeightTransport):
    """A transport that sends weights straight into a replica's engine, without files."""

    @classmethod
    @abstractmethod
    def check_replica(cls, engine: object, source: Any, replica_id: str) -> None:
        """Called while requests are still answered.

        Raises:
            WeightTransferFailed: this replica cannot receive.
        """

    @classmethod
    @abstractmethod
    async def receive(cls, engine: Any, source: Any, replica_id: str, change: WeightChange) -> tuple[str, int]:
        """Replace the engine's weights, as `Engine.load_weights` does. No request is answered meanwhile.

        Returns:
            Digest and number of tensors.

        Raises:
            WeightTransferFailed: they did not come, or have another digest than `change` names.
        """


def transport_class(kind: str) -> type[WeightTransport]:
    """Return the class of a transport: `kind` is the name of a plug-in, or `module:Class`.

    A file is refused: the name reaches the engine in the desired state, and its sender must not be able to execute a
    file.

    Raises:
        ConfigError: the class does not exist or is in a file.
    """
    if ".py:" in kind:
        raise ConfigError(
            f"generation.weight_sync.target is {kind!r}: name an installed module, package.module:Class; no file is run."
        )
    return plugins.chosen("weight_transport", kind, WeightTransport, "generation.weight_sync")


def load_transport(chosen: str | CustomWeightSync) -> WeightTransport:
    """Load the run's transport.

    Raises:
        ConfigError: the class does not exist, or its parameters are wrong.
    """
    kind, parameters = (chosen, {}) if isinstance(chosen, str) else (chosen.target, chosen.parameters)
    transport = transport_class(kind)
    try:
        return transport(transport.Config.model_validate(parameters), kind)
    except ValidationError as error:
        raise ConfigError(f"generation.weight_sync.parameters does not fit {kind}: {error}") from error


def parse_source(tree: dict[str, Any] | None) -> WeightSource | None:
    """Parse a source of the desired state; None means the checkpoint's files unchanged.

    Raises:
        ValueError: the transport is unknown, or the source does not fit it.
    """
    try:
        return None if tree is None else transport_class(str(tree.get("kind"))).Source.model_validate(tree)
    except (ConfigError, ValidationError, AttributeError) as error:
        raise ValueError(f"source is {tree!r}: {error}") from None


def fetch_weights(
    uri: str, source: WeightSource | None, digest: str | None, cache: NodeCache, current: FetchedWeights | None = None
) -> FetchedWeights:
    """Fetch the weights of the checkpoint at `uri` to this node.

    Args:
        digest: of the tensors; None accepts the digest of the checkpoint's manifest.
        current: weights that this replica holds now.

    Raises:
        DataError: the checkpoint is missing, damaged, or has other tensors than `digest` names.
        StoreError, OSError: the store cannot be reached; a retry may help.
    """
    from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint, fetch_in_dtype

    note, started = None, time.perf_counter()
    request = FetchRequest(uri, digest, cache, current)
    if source is not None:
        try:
            if (fetched := transport_class(source.kind).fetch(source, request)) is not None:
                return _proved(source.kind, request, *fetched, started)
        except (DataError, StoreError, OSError) as error:
            note = f"{source.kind}: {error}"
            logger.warning("%s is read whole, not by %s", uri, note)
    started = time.perf_counter()
    fetched = fetch_checkpoint(uri, cache) if source is None else fetch_in_dtype(uri, source.dtype, cache)
    weights = _proved(CHECKPOINT, request, *fetched, started)
    weights.note = note
    return weights


def _proved(
    kind: str, request: FetchRequest, directory: Path, entry: CacheEntry | None, started: float
) -> FetchedWeights:
    from roundhouse.weight_sync.checkpoint_files import proved_digest
    from roundhouse.weight_sync.tensor_files import TensorFile, weight_files

    fetched = time.perf_counter()
    try:
        present = proved_digest(request.uri, directory)
        if request.digest is not None and present != request.digest:
            raise DataError(f"The weights in {directory} have digest {present}, wanted was {request.digest}.")
        tensors = len({name for path in weight_files(directory) for name in TensorFile(path).names()})
    except BaseException:
        if entry is not None:
            entry.release()
        raise
    seconds = {"fetch": fetched - started, "digest": time.perf_counter() - fetched}
    return FetchedWeights(directory, present, tensors, kind, seconds=seconds, entry=entry)


class CheckpointTransport(WeightTransport):
    """The transport `store`: the checkpoint's own files; from a bucket in parallel ranges, once a node."""

    publishes_engine_format = False

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        yield Published(checkpoint.weights_digest)
