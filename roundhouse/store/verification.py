"""Whether a store still holds what its manifests say: every file, every digest, every reference.

Invariant: it only reads. A stage without a manifest is unfinished, which is no problem: the run that owns it goes on there. A
reference to a checkpoint that retention deleted is no problem either, since its numbers live on in the stages that used it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse.errors import StoreError
from roundhouse.store.identity import read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import MANIFEST, FileEntry, Manifest, Reference, sha256
from roundhouse.store.stage import read_manifest

Faults = Callable[[Location, Manifest], Iterable[str]]
"""What is wrong with a stage beyond its bytes, in words."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the store that is not as it was committed."""

    uri: str
    what: str
    remedy: str


@dataclass(slots=True)
class Verification:
    """What was looked at, and what is wrong."""

    manifests: int = 0
    files: int = 0
    size: int = 0
    """Bytes whose digests were checked."""
    unfinished: list[str] = field(default_factory=list)
    """Stages that were begun and have no manifest."""
    problems: list[Problem] = field(default_factory=list)


def verify(store: str, run_id: str | None = None, also: Faults | None = None) -> Verification:
    """Check everything below a store, or one of its runs.

    Args:
        also: what else is looked for in each complete stage whose files are sound.

    Raises:
        StoreError: there is no such store or run, or it cannot be read at all.
    """
    root = Location(store) if run_id is None else Location(store) / f"runs/{run_id}"
    names = root.tree()
    if not names:
        raise StoreError(
            f"{root.uri} holds nothing. Is it the right store? `--store` and `store` in the configuration."
        )
    found = Verification()
    complete = {name.removesuffix(MANIFEST) for name in names if name.endswith(f"/{MANIFEST}")}
    for directory in sorted(complete):
        _check_stage(root / directory.rstrip("/"), found, also)
    begun = {name.rsplit("/", 1)[0] + "/" for name in names if name.rsplit("/", 1)[-1].startswith("attempt-")}
    found.unfinished = [f"{root.uri}/{directory.rstrip('/')}" for directory in sorted(begun - complete)]
    for name in names:
        if name.rsplit("/", 1)[-1] == "run.json":
            _check_identity(root, name, found)
        if name.rsplit("/", 1)[-1] == "latest.json":
            _check_pointer(root, name, found)
    return found


def _check_stage(location: Location, found: Verification, also: Faults | None) -> None:
    redo = f"Delete {location.uri}/{MANIFEST}, and the run does this stage again."
    try:
        data = location.read(MANIFEST)
        manifest = Manifest.model_validate_json(data)
    except NotFound:
        return  # listed late, deleted since
    except (StoreError, ValueError) as error:
        found.problems.append(Problem(f"{location.uri}/{MANIFEST}", f"cannot be read: {error}", redo))
        return
    found.manifests += 1
    for entry in manifest.files:
        found.files += 1
        found.size += entry.size
        if (what := _fault(location, entry)) is not None:
            found.problems.append(Problem(f"{location.uri}/{entry.path}", what, f"Restore it from a copy. Or: {redo}"))
    sound = not any(problem.uri.startswith(f"{location.uri}/") for problem in found.problems)
    if also is not None and sound:
        found.problems += [Problem(location.uri, what, redo) for what in also(location, manifest)]
    found.problems += _dangling(location, manifest, redo)


def _fault(location: Location, entry: FileEntry) -> str | None:
    """What is wrong with a file; None when it is the one that was committed."""
    try:
        data = location.read(entry.path)
    except NotFound:
        return "is missing"
    except StoreError as error:
        return f"cannot be read: {error}"
    if len(data) != entry.size:
        return f"has {len(data)} bytes, committed were {entry.size}"
    if sha256(data) != entry.sha256:
        return f"has digest {sha256(data)[:12]}…, committed was {entry.sha256[:12]}…"
    if entry.path.endswith(".parquet") and entry.rows is not None:
        try:
            rows = pq.read_metadata(io.BytesIO(data)).num_rows
        except pa.ArrowInvalid as error:
            return f"is no Parquet file: {error}"
        if rows != entry.rows:
            return f"has {rows} rows, the manifest says {entry.rows}"
    return None


def _dangling(location: Location, manifest: Manifest, redo: str) -> Iterator[Problem]:
    """References of a manifest that lead to nothing, or to something else."""
    for name, reference in {**manifest.inputs, **manifest.outputs}.items():
        try:
            read_manifest(reference)
        except StoreError as error:
            gone = not Location(reference.uri).exists(MANIFEST)
            if gone and reference.kind == "checkpoint":
                continue
            yield Problem(location.uri, f"its {name} is not what it was made from: {error}", redo)


def _check_identity(root: Location, name: str, found: Verification) -> None:
    folder = name.rpartition("/")[0]
    try:
        read_identity(root / folder if folder else root)
    except StoreError as error:
        remedy = "Restore it from a copy; the run cannot be opened without it."
        found.problems.append(Problem(f"{root.uri}/{name}", str(error), remedy))


def _check_pointer(root: Location, name: str, found: Verification) -> None:
    try:
        read_manifest(Reference.model_validate_json(root.read(name)))
    except (StoreError, ValueError) as error:
        remedy = "Delete it: the newest complete checkpoint is found without it."
        found.problems.append(Problem(f"{root.uri}/{name}", f"points to no complete checkpoint: {error}", remedy))
