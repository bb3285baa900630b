"""One stage of one iteration: attempts that write data files, and the one commit that completes the stage.

Life cycle:

    Stage.begin() ──> Attempt.write_table()/write_json()/adopt() … ──> Attempt.commit() ──> Reference
        │                                                                    │
      attempt-0001.json                                              manifest.json (created, never replaced)

Invariants: data files carry their attempt's number in the name, so attempts mix only by explicit adoption. Of two
writers that commit, one wins and the other receives the winner's reference. A driver that lost its run's lease commits
nothing. Reads check the committed digest. A part of an interrupted attempt lacks a committed digest, but has page
checksums (`read_part`).

A stage or checkpoint is complete exactly if its `manifest.json` exists and the digests in it hold. One writer writes
the manifest once, last. Tasks exchange a `Reference` of a few hundred bytes: place and digest of the manifest and a few
numbers for people. `started_at` and `finished_at` are for people; nothing depends on them. Renamed metrics are read
under their current names (`current_names`).
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import resource
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, field_validator

from roundhouse import cpu
from roundhouse.errors import StoreError
from roundhouse.store.lease import Fence
from roundhouse.store.location import AlreadyExists, Location, NotFound, waiting

WEIGHTS_DIGEST = "weights_digest"
"""In the details of a train stage and a checkpoint: the digest of the policy's tensors."""
MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
DIGEST_THREADS = 2
"""Files hashed at a time: with SHA instructions one core hashes 1.3 GB/s, and waits for the disk in between."""


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
    """Directory of the files below the manifest's, such as `a0002-1f3c9a2e`. Empty in older stores: their files are
    next to the manifest."""
    files: list[FileEntry]
    weights_digest: str | None = None
    """Digest of the policy's tensors, if it was taken during their writing."""

    def by_name(self) -> dict[str, FileEntry]:
        """Each file by its name in the model's directory, such as `config.json`."""
        prefix = f"{self.directory}/" if self.directory else ""
        return {entry.path.removeprefix(prefix): entry for entry in self.files}

    def weights(self) -> dict[str, FileEntry]:
        """Return the entries of `by_name` that hold weights of the policy, not the trainer's state."""
        return {name: entry for name, entry in self.by_name().items() if is_weights(name)}

    def holds(self, directory: str) -> bool:
        """Return whether a file is in this directory of the model."""
        return any(name.startswith(f"{directory}/") for name in self.by_name())

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
        """Return the files by content: under these names, without fields that depend on the time of writing."""
        return [entry.model_copy(update={"path": name, "stamp": None}) for name, entry in self.by_name().items()]


def is_weights(name: str) -> bool:
    """Return whether a file of a model's directory holds weights of the policy, not the trainer's state."""
    return name.endswith(".safetensors") and "/" not in name


class Provenance(BaseModel):
    """Dependencies of a stage's result in addition to its inputs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy_version: int
    config_digest: str
    code_version: str
    seed: int
    inputs: str | None = None
    """Digest of the run's task rows and user code (`roundhouse.store.run_inputs`); None if they are not on record."""


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
    """Directory of a checkpoint's files (`ModelFiles`)."""
    outputs: dict[str, Reference] = {}
    """References to results elsewhere in the store."""
    counts: dict[str, int] = {}
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {}
    """Further JSON data for readers of this stage."""
    started_at: float
    """Seconds since the epoch."""
    finished_at: float
    resources: dict[str, float] = {}
    """cpu_seconds of the stage's processes, other_processes_cpu_seconds of those outside the lease's count;
    store_seconds that the committing process waited for the store, and its max_rss_mib."""

    @field_validator("metrics")
    @classmethod
    def _under_current_names(cls, metrics: dict[str, float]) -> dict[str, float]:
        return current_names(metrics)

    @property
    def model_files(self) -> ModelFiles:
        """Return the files of a checkpoint."""
        return ModelFiles(directory=self.directory, files=self.files)

    def to_bytes(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def is_as_written(location: Location, entry: FileEntry) -> bool:
    """Return whether an object is the hashed one, by its stamp and without reading it; False may mean unknown.

    Raises:
        NotFound: the object does not exist.
    """
    return entry.stamp is not None and location.stamp(entry.path) == (entry.size, entry.stamp)


def fault_of(location: Location, entry: FileEntry) -> str | None:
    """Return the fault of an object, read completely in bounded parts; None if its bytes are those of the entry."""
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
    """Return the location of a model's files: for a checkpoint, the directory that its manifest names; else the
    directory itself."""
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
"""Renamed prefixes of all other names."""


def current_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under current names. If an old and a new name meet, keep the renamed metric."""
    renamed = {new: metrics[old] for old in metrics if (new := current_name(old)) != old}
    return {name: value for name, value in metrics.items() if current_name(name) == name} | renamed


def current_name(name: str) -> str:
    if name in RENAMED_METRICS:
        return RENAMED_METRICS[name]
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


logger = logging.getLogger(__name__)

ROW_GROUP = 1024
"""Rows of a part that are compressed together: a reader of one rollout of 100,000 (the viewer) reads these and not all."""

WRITERS = "writers"
"""Directory of the names that several writers of one attempt have taken; it can go once the stage is complete."""

EXPANDED_BYTES, EXPANSION = 2**30, 100
"""Size of the values of a Parquet file, in bytes and in times of its size: the larger one is the limit."""
_MOST_BATCH_ROWS = 2**16
MOST_WRITERS = 99
"""Largest number of writers of one attempt under one label, each restarted after a loss."""

_ATTEMPT = re.compile(r"attempt-(\d{4,})\.json")


class StageKind(StrEnum):
    """Work of a stage, in the order of an iteration. The values are stored as directory names and in manifests."""

    OFFLINE = "offline"
    REFIT = "refit"
    COLLECT = "collect"
    GENERATE = "generate"
    """With a window: the rollouts of an iteration, from which the collect stages of several steps take their groups."""
    VALIDATE = "validate"
    TRAIN = "train"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    PROMOTE = "promote"
    REPORT = "report"


class Stage:
    """A stage's directory, complete or not."""

    def __init__(self, location: Location, *, kind: str, run_id: str, iteration: int) -> None:
        self.location = location
        self.kind = str(kind)
        self.run_id = run_id
        self.iteration = iteration

    def reference(self) -> Reference | None:
        """The reference of the complete stage; None while it is not complete."""
        loaded = _load_manifest(self.location)
        return None if loaded is None else _reference(self.location, *loaded)

    def begin(self, provenance: Provenance, fence: Fence | None = None) -> Attempt:
        """Start a new attempt at this stage.

        Args:
            fence: fence of the run's driver.

        Raises:
            LeaseLost: another process drives the run.
        """
        if fence is not None:
            fence.check()
        started_at = time.time()
        # Only a first guess: the listing may be late, `create` decides.
        listed = (_ATTEMPT.fullmatch(name) for name in self.location.names())
        number = 1 + max((int(match[1]) for match in listed if match is not None), default=0)
        while True:
            # The nonce distinguishes two writers that are equal otherwise: process 1 of two containers, at one clock tick.
            record = {"attempt": number, "started_at": started_at, "pid": os.getpid(), "nonce": uuid.uuid4().hex}
            try:
                self.location.create(f"attempt-{number:04d}.json", json.dumps(record).encode())
                break
            except AlreadyExists:
                number += 1
        return Attempt(self, number, provenance, started_at, fence=fence)

    def join(self, provenance: Provenance, number: int, label: str) -> Attempt:
        """Join attempt `number` as one of its several writers, which commits nothing itself. A repeated label gets a
        new writer number:
        `rollouts-a0002-s0001of0004-02-00000.parquet` is of the second writer."""
        started_at = time.time()
        for again in range(1, MOST_WRITERS + 1):
            name = f"{number:04d}-{label}-{again:02d}"
            try:
                self.location.create(f"{WRITERS}/{name}.json", json.dumps({"nonce": uuid.uuid4().hex}).encode())
                return Attempt(self, number, provenance, started_at, name=name)
            except AlreadyExists:
                continue
        raise StoreError(
            f"{self.location.uri}: there were {MOST_WRITERS} writers {label} of attempt {number}. Why do all end?"
        )


class Attempt:
    """A running attempt; see the module's docstring."""

    def __init__(
        self,
        stage: Stage,
        number: int,
        provenance: Provenance,
        started_at: float,
        name: str | None = None,
        fence: Fence | None = None,
    ) -> None:
        self.stage = stage
        self.number = number
        self.name = name or f"{number:04d}"
        """Part of the names of all its files."""
        self._started_at = started_at
        self._cpu = cpu.clock()
        self._started_cpu = self._cpu()
        self._elsewhere = 0.0
        self._waited = waiting.seconds
        self._provenance = provenance
        self._fence = fence
        self._files: list[FileEntry] = []
        self._parts: dict[str, int] = {}

    def write_table(self, dataset: str, table: pa.Table) -> FileEntry:
        """Write the next part of a dataset, as Parquet."""
        part = self._parts.get(dataset, 0)
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True, row_group_size=ROW_GROUP)
        entry = self.write_bytes(f"{dataset}-a{self.name}-{part:05d}.parquet", sink.getvalue(), table.num_rows)
        self._parts[dataset] = part + 1  # a part that could not be written is not counted
        return entry

    def write_json(self, name: str, value: Any) -> FileEntry:
        """Write a JSON file `<name>-a<attempt>.json`."""
        return self.write_bytes(f"{name}-a{self.name}.json", json.dumps(value, indent=1).encode())

    def write_bytes(self, name: str, data: bytes, rows: int | None = None) -> FileEntry:
        """Write a data file under the name given."""
        self.stage.location.write(name, data)
        return self.adopt(FileEntry(path=name, size=len(data), sha256=sha256(data), rows=rows))

    @property
    def files(self) -> list[FileEntry]:
        """Return the files that were written or adopted so far."""
        return list(self._files)

    @property
    def provenance(self) -> Provenance:
        return self._provenance

    def charge(self, cpu_seconds: float, *, of_other_process: bool = False) -> None:
        """Count the CPU time of a thread or program (`roundhouse.cpu`) that worked for this attempt. `of_other_process`: of one
        that the lease's record does not count."""
        self._started_cpu -= cpu_seconds
        self._elsewhere += cpu_seconds if of_other_process else 0.0

    def adopt(self, entry: FileEntry) -> FileEntry:
        """Count a file that is already in the stage's directory among this attempt's files."""
        self._files.append(entry)
        return entry

    def commit(
        self,
        *,
        inputs: dict[str, Reference] | None = None,
        outputs: dict[str, Reference] | None = None,
        counts: dict[str, int] | None = None,
        metrics: dict[str, float] | None = None,
        details: dict[str, Any] | None = None,
        directory: str = "",
    ) -> Reference:
        """Complete the stage and return its reference, or the winner's if another writer was first.

        Args:
            directory: directory of a checkpoint's files (`ModelFiles`).

        Raises:
            LeaseLost: another process drives the run; nothing was committed.
        """
        manifest = Manifest(
            kind=self.stage.kind,
            run_id=self.stage.run_id,
            iteration=self.stage.iteration,
            attempt=self.number,
            lease=None if self._fence is None else self._fence.token,
            provenance=self._provenance,
            inputs=inputs or {},
            files=self._files,
            directory=directory,
            outputs=outputs or {},
            counts=counts or {},
            metrics=metrics or {},
            details=details or {},
            started_at=self._started_at,
            finished_at=time.time(),
            resources={
                "cpu_seconds": round(self._cpu() - self._started_cpu, 3),
                "other_processes_cpu_seconds": round(self._elsewhere, 3),
                "store_seconds": round(waiting.seconds - self._waited, 3),
                "max_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            },
        )
        data = manifest.to_bytes()
        if self._fence is not None:
            self._fence.check()
        try:
            self.stage.location.create(MANIFEST, data)
        except AlreadyExists:
            winner = self.stage.reference()
            if winner is None:
                raise StoreError(f"{self.stage.location.uri}: the manifest vanished while it was committed.") from None
            return winner
        return _reference(self.stage.location, manifest, data)


def read_manifest(reference: Reference) -> Manifest:
    """Read the manifest of a reference.

    Raises:
        StoreError: it is gone, or differs from the referenced one.
    """
    loaded = _load_manifest(Location(reference.uri))
    if loaded is None:
        raise StoreError(f"{reference.uri} has no {MANIFEST}: the {reference.kind} was deleted, or never completed.")
    manifest, data = loaded
    if sha256(data) != reference.digest:
        raise StoreError(f"{reference.uri}/{MANIFEST} has digest {sha256(data)[:12]}…, not {reference.digest[:12]}….")
    return manifest


def read_file(reference: Reference, entry: FileEntry) -> bytes:
    """A data file of a complete stage, with its digest checked.

    Raises:
        StoreError: missing, truncated or changed since the commit.
    """
    return read_entry(Location(reference.uri), entry)


def read_entry(location: Location, entry: FileEntry) -> bytes:
    """Read a file of this directory as `read_file` does."""
    data = location.read(entry.path)
    if len(data) != entry.size or sha256(data) != entry.sha256:
        raise StoreError(
            f"{location.uri}/{entry.path} is damaged: {len(data)} bytes with digest {sha256(data)[:12]}…, committed were "
            f"{entry.size} bytes with {entry.sha256[:12]}…. Restore it, or delete the stage's manifest to run it again."
        )
    return data


def parse_parquet(data: bytes, columns: list[str] | None = None, *, verify_checksums: bool = False) -> pa.Table:
    """Parse a Parquet file in memory.

    Arrow reads a Python file object in background threads. If such a thread drops its reference during interpreter
    exit, the process aborts ("terminate called without an active exception", apache/arrow#34314), and finished work
    counts as failed. Reading a buffer in the caller's thread avoids this.

    A page of a few bytes can stand for millions of equal values. So rows are read in batches that fit into the limit, unless
    all of them do, and the first row beyond it ends the reading.

    Raises:
        pyarrow.ArrowException: the bytes are not a Parquet file, or a damaged one, or hold more than `EXPANDED_BYTES` and
            `EXPANSION` times their size.
    """
    limit = max(EXPANDED_BYTES, EXPANSION * len(data))
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=verify_checksums) as file:
        groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
        encoded = sum(max(1, group.total_byte_size) for group in groups)  # no value is longer
        if file.metadata.num_rows * encoded <= limit:
            return file.read(columns, use_threads=False)
        parts = [file.read_row_groups([], columns)]
        schema, expanded = _without_dictionaries(parts[0].schema), 0
        for batch in file.iter_batches(min(limit // encoded + 1, _MOST_BATCH_ROWS), columns=columns, use_threads=False):
            parts.append(pa.Table.from_batches([batch]).cast(schema))
            expanded += parts[-1].nbytes
            if expanded > limit:
                raise pa.ArrowInvalid(
                    f"{len(data)} bytes of Parquet hold more than {limit} bytes of values: the file is damaged or hostile"
                )
        return pa.concat_tables([parts[0].cast(schema), *parts[1:]]).combine_chunks()


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the types that the values of dictionaries have."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], schema.metadata)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_plain(each.type)) for each in kind])
    return kind


def read_part(location: Location, name: str, schema: pa.Schema) -> pa.Table | None:
    """A Parquet file that no manifest vouches for; None when it cannot be trusted: it is gone, cut short or damaged.

    What one changed bit can do without being noticed by the checksums of the pages is to rename columns in the footer.

    Raises:
        StoreError: the store does not answer.
    """
    try:
        table = _completed(parse_parquet(location.read(name), verify_checksums=True), schema)
    except NotFound:
        return None  # listed late, deleted since
    except (pa.ArrowException, OSError, ValueError) as error:
        logger.warning("%s/%s is left out, it is damaged: %s", location.uri, name, error)
        return None
    if not table.schema.equals(schema):
        logger.warning("%s/%s is left out, its columns are not those of its kind", location.uri, name)
        return None
    return table


def _completed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """With null for what older parts lack: columns that the schema's metadata calls `added_later`."""
    lacking = [field for field in schema if field.name not in table.schema.names]
    if not lacking or any(b"added_later" not in (field.metadata or {}) for field in lacking):
        return table
    if not set(table.schema.names) <= set(schema.names):
        return table
    for field in lacking:
        table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names)


def read_table(reference: Reference, dataset: str) -> pa.Table:
    """All parts of a dataset of a complete stage as one table, in the order they were written."""
    tables = [
        parse_parquet(read_file(reference, entry))
        for entry in read_manifest(reference).files
        if entry.path.startswith(f"{dataset}-") and entry.path.endswith(".parquet")
    ]
    if not tables:
        raise StoreError(f"{reference.uri} holds no dataset {dataset!r}.")
    return pa.concat_tables(tables, promote_options="default")  # older parts may lack columns


def _load_manifest(location: Location) -> tuple[Manifest, bytes] | None:
    try:
        data = location.read(MANIFEST)
    except NotFound:
        return None
    try:
        return Manifest.model_validate_json(data), data
    except ValueError as error:
        raise StoreError(f"{location.uri}/{MANIFEST} is not a manifest: {error}") from error


def _reference(location: Location, manifest: Manifest, data: bytes) -> Reference:
    return Reference(
        kind=manifest.kind,
        uri=location.uri,
        digest=sha256(data),
        iteration=manifest.iteration,
        policy_version=manifest.provenance.policy_version,
        counts=manifest.counts,
    )
