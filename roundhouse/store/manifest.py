"""Manifests and references: what makes a stage complete, and what passes between tasks instead of data.

Invariant: a stage or checkpoint is complete exactly when its `manifest.json` exists and the digests in it hold. The
manifest is written last, once, by one writer. A `Reference` is the manifest's place and digest plus the few numbers a
person wants to see; it is a few hundred bytes, whatever it refers to.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from roundhouse.store.location import Location, NotFound
from roundhouse.store.metric_names import current_names

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


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
    """Below the manifest's, such as `a0002-1f3c9a2e`. Empty in stores of before, whose files lie beside the manifest."""
    files: list[FileEntry]

    def by_name(self) -> dict[str, FileEntry]:
        """Each file by its name in the model's directory, such as `config.json`."""
        prefix = f"{self.directory}/" if self.directory else ""
        return {entry.path.removeprefix(prefix): entry for entry in self.files}

    def named(self) -> list[FileEntry]:
        """The files, with these names for paths."""
        return [entry.model_copy(update={"path": name}) for name, entry in self.by_name().items()]


class Provenance(BaseModel):
    """What the result of a stage depends on beside its inputs."""

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
    """Token of the driver that committed it (`roundhouse.store.lease`); None where nobody drove the run."""
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
    """cpu_seconds of the processes that ran the stage, max_rss_mib of the one that committed it."""

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


def model_location(location: Location) -> Location:
    """Where a model's files lie: of a checkpoint, the directory that its manifest names; else the directory itself."""
    try:
        manifest = Manifest.model_validate_json(location.read(MANIFEST))
    except (NotFound, ValueError):  # a model of elsewhere, with a manifest of another kind at most
        return location
    return location / manifest.directory if manifest.directory else location


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
