"""One stage of one iteration: attempts that write data files, and the one commit that makes the stage complete.

Life cycle:

    Stage.begin() ──> Attempt.write_table()/write_json()/adopt() … ──> Attempt.commit() ──> Reference
        │                                                                    │
      attempt-0001.json                                              manifest.json (created, never replaced)

Invariants: data files carry their attempt's number in the name, so attempts never mix unless one adopts another's
file on purpose; of two writers that commit, one wins and the other is handed the winner's reference; a driver that lost
its run's lease commits nothing; what is read back has the digest that was committed. A part of an attempt that was
interrupted has no committed digest; it carries checksums of its own pages (`read_part`).

Clocks: `started_at`, `finished_at` are for people. Nothing is decided by them.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import resource
import time
import uuid
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse import cpu
from roundhouse.errors import StoreError
from roundhouse.store.lease import Fence
from roundhouse.store.location import AlreadyExists, Location, NotFound, waiting
from roundhouse.store.manifest import MANIFEST, FileEntry, Manifest, Provenance, Reference, sha256

logger = logging.getLogger(__name__)

ROW_GROUP = 1024
"""Rows of a part that are compressed together: a reader of one rollout of 100,000 (the viewer) reads these and not all."""

WRITERS = "writers"
"""Directory of the names that several writers of one attempt have taken; it can go once the stage is complete."""

MOST_WRITERS = 99
"""Of one attempt under one label: as many as were started one after another, because each was lost."""

_ATTEMPT = re.compile(r"attempt-(\d{4,})\.json")


class StageKind(StrEnum):
    """What a stage of an iteration does, in the order of an iteration. The values are stored: directory names, manifests."""

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
            fence: what the run's driver acts under.

        Raises:
            LeaseLost: another process drives the run.
        """
        if fence is not None:
            fence.check()
        started_at = time.time()
        # Only a first guess: the listing may be late, `create` decides.
        listed = (_ATTEMPT.fullmatch(name) for name in self.location.names())
        number = 1 + max((int(found[1]) for found in listed if found is not None), default=0)
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
        """Write for attempt `number` as one of its several writers, which commits nothing itself. What comes again under the
        same label is another writer, with names of its own: `rollouts-a0002-s0001of0004-02-00000.parquet` is of the second."""
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
        self._parts[dataset] = part + 1
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True, row_group_size=ROW_GROUP)
        return self.write_bytes(f"{dataset}-a{self.name}-{part:05d}.parquet", sink.getvalue(), table.num_rows)

    def write_json(self, name: str, value: Any) -> FileEntry:
        """Write a JSON file `<name>-a<attempt>.json`."""
        return self.write_bytes(f"{name}-a{self.name}.json", json.dumps(value, indent=1).encode())

    def write_bytes(self, name: str, data: bytes, rows: int | None = None) -> FileEntry:
        """Write a data file under the name given."""
        self.stage.location.write(name, data)
        return self.adopt(FileEntry(path=name, size=len(data), sha256=sha256(data), rows=rows))

    @property
    def files(self) -> list[FileEntry]:
        """What was written or adopted so far."""
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
        """Make the stage complete; return its reference, or the winner's if another writer was first.

        Args:
            directory: where a checkpoint's files lie (`ModelFiles`).

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
    """The manifest behind a reference.

    Raises:
        StoreError: it is gone, or is not the one that was referred to.
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
    """As `read_file`, of a file in this directory."""
    data = location.read(entry.path)
    if len(data) != entry.size or sha256(data) != entry.sha256:
        raise StoreError(
            f"{location.uri}/{entry.path} is damaged: {len(data)} bytes with digest {sha256(data)[:12]}…, committed were "
            f"{entry.size} bytes with {entry.sha256[:12]}…. Restore it, or delete the stage's manifest to run it again."
        )
    return data


def parse_parquet(data: bytes, columns: list[str] | None = None, *, verify_checksums: bool = False) -> pa.Table:
    """The rows of a Parquet file that is in memory.

    Arrow reads a Python file object in threads of its own. One that still drops its reference while the interpreter ends
    aborts the process ("terminate called without an active exception", apache/arrow#34314), so that work which is done and
    committed counts as failed. A buffer read in the caller's thread leaves no thread behind.

    Raises:
        pyarrow.ArrowException: the bytes are no Parquet file, or a damaged one.
    """
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=verify_checksums) as file:
        return file.read(columns, use_threads=False)


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
