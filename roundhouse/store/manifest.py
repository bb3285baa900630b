"""Manifests and references: what makes a stage complete, and what passes between tasks instead of data.

Invariant: a stage or checkpoint is complete exactly when its `manifest.json` exists and the digests in it hold. The manifest is
written last, once, by one writer. A `Reference` is the manifest's place and digest plus the few numbers a person wants to see;
it is a few hundred bytes, whatever it refers to.

Metrics that had another name are read under today's (`current_names`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from roundhouse.errors import StoreError
from roundhouse.store.location import Location, NotFound

WEIGHTS_DIGEST = "weights_digest"
"""In the details of a train stage and a checkpoint: the digest of the policy's tensors."""
MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
DIGEST_THREADS = 2
"""Files hashed at a time: one core takes 1.3 GB/s of SHA-256 where it has the instructions, and waits for the disk between."""


class Reference(BaseModel):
    """A complete stage, checkpoint or dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    """The stage's name, or `checkpoint`."""
    uri: str
    """Directory that holds the manifest."""
    digest: str
    """SHA-256 of the manifest, hex."""
    iteration: int
    policy_version: int
    counts: dict[str, int] = {}


class FileEntry(BaseModel):
    """A data file of a manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Relative to the manifest's directory."""
    size: int
    """Bytes."""
    sha256: str
    rows: int | None = None
    """Rows of a Parquet file."""
    stamp: str | None = None
    """`Location.stamp` when the digest was taken. While an object has it, its bytes need not be read to be known."""

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        if not path or path.startswith("/") or "\\" in path or ".." in path.split("/") or not path.isprintable():
            raise ValueError(f"the file name {path[:200]!r} leads out of its directory")
        return path


class ModelFiles(BaseModel):
    """The files of a checkpoint, in the directory of the attempt that wrote them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: str = ""
    """Below the manifest's, such as `a0002-1f3c9a2e`. Empty in older stores, whose files are next to the manifest."""
    files: list[FileEntry]
    weights_digest: str | None = None
    """Of the policy's tensors, where it was taken as they were written."""

    def by_name(self) -> dict[str, FileEntry]:
        """Each file by its name in the model's directory, such as `config.json`."""
        prefix = f"{self.directory}/" if self.directory else ""
        return {entry.path.removeprefix(prefix): entry for entry in self.files}

    def weights(self) -> dict[str, FileEntry]:
        """Those of `by_name` that hold weights of the policy, rather than the trainer's state."""
        return {name: entry for name, entry in self.by_name().items() if is_weights(name)}

    def details(self) -> dict[str, Any]:
        """They, as the details of the train stage's manifest record them."""
        return {
            "checkpoint_directory": self.directory,
            "checkpoint_files": [entry.model_dump() for entry in self.files],
            WEIGHTS_DIGEST: self.weights_digest,
        }

    @classmethod
    def written_by(cls, train: Manifest) -> ModelFiles:
        """The new version's files, as the train stage recorded them."""
        return cls(
            directory=train.details.get("checkpoint_directory", ""),
            files=[FileEntry.model_validate(raw) for raw in train.details["checkpoint_files"]],
            weights_digest=train.details.get(WEIGHTS_DIGEST),
        )

    def named(self) -> list[FileEntry]:
        """The files by what they hold: with these names for paths, and without what depends on when they were written."""
        return [entry.model_copy(update={"path": name, "stamp": None}) for name, entry in self.by_name().items()]


def is_weights(name: str) -> bool:
    """Whether a file of a model's directory holds weights of the policy, rather than the trainer's state."""
    return name.endswith(".safetensors") and "/" not in name


class Provenance(BaseModel):
    """What the result of a stage depends on in addition to its inputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy_version: int
    config_digest: str
    code_version: str
    seed: int


class Manifest(BaseModel):
    """The record of one complete stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    kind: str
    run_id: str
    iteration: int
    attempt: int
    lease: int | None = None
    """Token of the driver that committed it (`roundhouse.store.lease`); None if the run had no driver."""
    provenance: Provenance
    inputs: dict[str, Reference]
    files: list[FileEntry]
    directory: str = ""
    """Of a checkpoint's files (`ModelFiles`)."""
    outputs: dict[str, Reference] = {}
    """What the stage completed elsewhere in the store."""
    counts: dict[str, int] = {}
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {}
    """What else a reader of this stage wants, in JSON."""
    started_at: float
    """Seconds since the epoch."""
    finished_at: float
    resources: dict[str, float] = {}
    """cpu_seconds of the processes that ran the stage, other_processes_cpu_seconds of those that the lease's record does not
    count; store_seconds in which the one that committed it waited for the store meanwhile, and its max_rss_mib."""

    @field_validator("metrics")
    @classmethod
    def _under_current_names(cls, metrics: dict[str, float]) -> dict[str, float]:
        return current_names(metrics)

    @property
    def model_files(self) -> ModelFiles:
        """Of a checkpoint."""
        return ModelFiles(directory=self.directory, files=self.files)

    def to_bytes(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def is_as_written(location: Location, entry: FileEntry) -> bool:
    """Whether an object is the one whose digest was taken, judged by its stamp, without reading it; False may mean unknown.

    Raises:
        NotFound: there is none.
    """
    return entry.stamp is not None and location.stamp(entry.path) == (entry.size, entry.stamp)


def fault_of(location: Location, entry: FileEntry) -> str | None:
    """What is wrong with an object, read to its end a bounded part at a time; None when its bytes are those of the entry."""
    try:
        size, digest = location.digest(entry.path)
    except NotFound:
        return "is missing"
    except StoreError as error:
        return f"cannot be read: {error}"
    if size != entry.size:
        return f"has {size} bytes, committed were {entry.size}"
    if digest != entry.sha256:
        return f"has digest {digest[:12]}…, committed was {entry.sha256[:12]}…"
    return None


def faults_of(location: Location, entries: Iterable[FileEntry], *, as_written: bool = False) -> Iterator[str | None]:
    """`fault_of` each, several being read at a time.

    Args:
        as_written: one with the stamp of the moment in which its digest was taken is not read.
    """

    def fault(entry: FileEntry) -> str | None:
        try:
            return None if as_written and is_as_written(location, entry) else fault_of(location, entry)
        except NotFound:
            return "is missing"

    with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="digest") as pool:
        yield from pool.map(fault, entries)


def model_location(location: Location) -> Location:
    """Where a model's files lie: of a checkpoint, the directory that its manifest names; else the directory itself."""
    try:
        manifest = Manifest.model_validate_json(location.read(MANIFEST))
    except (NotFound, ValueError):  # a model of elsewhere, with a manifest of another kind at most
        return location
    return location / manifest.directory if manifest.directory else location


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


RENAMED_METRICS = {
    "train/idle_turns": "train/idle_microbatches",
    "validate/put_aside": "validate/filtered",
    "seconds/waited_for_rollouts": "time/rollout_wait",
    "cost/money": "cost/total",
    "wasted_tokens/failed": "waste/failed_tokens",
    "wasted_tokens/quarantined": "waste/quarantined_tokens",
    "wasted_tokens/omitted": "waste/omitted_tokens",
    "wasted_tokens/untrained": "waste/untrained_tokens",
    "wasted_tokens/share": "waste/token_fraction",
    "evaluation/reward_mean": "evaluation/reward/mean",
    "evaluation/reward_stderr": "evaluation/reward/stderr",
    "evaluation/reward_low": "evaluation/reward/low",
    "evaluation/reward_high": "evaluation/reward/high",
}
_PREFIXES = {"seconds/": "time/", "staleness/effective_sample/": "staleness/ess/"}
"""Of all other names that begin so."""


def current_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under today's names. Where an old and a new name meet, the renamed metric is the one that is kept."""
    renamed = {new: metrics[old] for old in metrics if (new := current_name(old)) != old}
    return {name: value for name, value in metrics.items() if current_name(name) == name} | renamed


def current_name(name: str) -> str:
    if name in RENAMED_METRICS:
        return RENAMED_METRICS[name]
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
