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
    provenance: Provenance
    inputs: dict[str, Reference]
    files: list[FileEntry]
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

    def to_bytes(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
