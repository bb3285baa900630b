"""Verification of a store against its manifests: every file, every digest, every reference.

Invariant: it only reads. A stage without a manifest is unfinished, which is not a fault: its run resumes there.
References to deleted checkpoints are not faults, because their numbers remain in the stages that used them; neither are
references of re-scored rollouts to their source collection.

`find_garbage` lists files that no manifest names and no process will read: files next to a manifest that it does not
name (parts of an attempt that lost or was repeated), a checkpoint directory without a manifest that is older than the
newest checkpoint (an interrupted retention), and temporary files unchanged for a day, because younger ones may belong
to running writes. Parts of an unfinished stage are not garbage, because the run resumes from them, nor are records of
attempts.

    collect/   manifest.json  attempt-0001.json  attempt-0002.json  rollouts-a0002-00000.parquet     kept
               rollouts-a0001-00000.parquet                                                          garbage
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse.errors import StoreError
from roundhouse.store.disk import is_temporary
from roundhouse.store.lineage import IDENTITY, read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.stage import MANIFEST, FileEntry, Manifest, Reference, StageKind, faults_of, read_manifest

Faults = Callable[[Location, Manifest], Iterable[str]]
"""Function that returns faults of a stage beyond its bytes, as text."""


@dataclass(frozen=True, slots=True)
class StoreProblem:
    """Something in the store that is not as it was committed."""

    uri: str
    what: str
    remedy: str


@dataclass(slots=True)
class Verification:
    """Checked objects and their faults."""

    manifests: int = 0
    files: int = 0
    size: int = 0
    """Bytes with checked digests."""
    unfinished: list[str] = field(default_factory=list)
    """Started stages without a manifest."""
    problems: list[StoreProblem] = field(default_factory=list)


def verify(store: str, run_id: str | None = None, also: Faults | None = None) -> Verification:
    """Check a store, or one of its runs.

    Args:
        also: further check of each complete stage with sound files.

    Raises:
        StoreError: the store or run does not exist, or cannot be read at all.
    """
    root = Location(store) if run_id is None else Location(store) / f"runs/{run_id}"
    names = root.tree()
    if not names:
        raise StoreError(
            f"{root.uri} holds nothing. Is it the right store? `--store` and `store` in the configuration."
        )
    result = Verification()
    complete = {name.removesuffix(MANIFEST) for name in names if name.endswith(f"/{MANIFEST}")}
    for directory in sorted(complete):
        _check_stage(root / directory.rstrip("/"), result, also)
    started = {name.rsplit("/", 1)[0] + "/" for name in names if name.rsplit("/", 1)[-1].startswith("attempt-")}
    result.unfinished = [f"{root.uri}/{directory.rstrip('/')}" for directory in sorted(started - complete)]
    for name in names:
        folder, _, file = name.rpartition("/")
        try:
            if file == IDENTITY:
                remedy = "Restore it from a copy; the run cannot be opened without it."
                read_identity(root / folder if folder else root)
            elif file == "latest.json":
                remedy = "Delete it: the newest complete checkpoint is found without it."
                read_manifest(Reference.model_validate_json(root.read(name)))
        except (StoreError, ValueError) as error:
            what = str(error) if file == IDENTITY else f"points to no complete checkpoint: {error}"
            result.problems.append(StoreProblem(f"{root.uri}/{name}", what, remedy))
    return result


def _check_stage(location: Location, found: Verification, also: Faults | None) -> None:
    redo = f"Delete {location.uri}/{MANIFEST}, and the run does this stage again."
    try:
        data = location.read(MANIFEST)
        manifest = Manifest.model_validate_json(data)
    except NotFound:
        return  # listed late, deleted since
    except (StoreError, ValueError) as error:
        found.problems.append(StoreProblem(f"{location.uri}/{MANIFEST}", f"cannot be read: {error}", redo))
        return
    found.manifests += 1
    for entry, what in zip(manifest.files, faults_of(location, manifest.files), strict=True):
        found.files += 1
        found.size += entry.size
        if (what := what or _fault_of_rows(location, entry)) is not None:
            found.problems.append(
                StoreProblem(f"{location.uri}/{entry.path}", what, f"Restore it from a copy. Or: {redo}")
            )
    sound = not any(problem.uri.startswith(f"{location.uri}/") for problem in found.problems)
    if also is not None and sound:
        found.problems += [StoreProblem(location.uri, what, redo) for what in also(location, manifest)]
    found.problems += _dangling(location, manifest, redo)


def _fault_of_rows(location: Location, entry: FileEntry) -> str | None:
    """Return the fault of the rows of a file with sound bytes."""
    if entry.rows is None or not entry.path.endswith(".parquet"):
        return None
    try:
        rows = pq.read_metadata(_Ranges(location, entry)).num_rows
    except pa.ArrowInvalid as error:
        return f"is not a Parquet file: {error}"
    return None if rows == entry.rows else f"has {rows} rows, the manifest has {entry.rows}"


class _Ranges(io.RawIOBase):
    """An object as a file that reads only requested ranges: for Parquet, the footer."""

    def __init__(self, location: Location, entry: FileEntry) -> None:
        self._location, self._entry, self._at = location, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._entry.size if size < 0 else min(self._entry.size, self._at + size)
        data = self._location.read_range(self._entry.path, self._at, end) if end > self._at else b""
        self._at += len(data)
        return data


def _dangling(location: Location, manifest: Manifest, redo: str) -> Iterator[StoreProblem]:
    """References of a manifest that lead to nothing, or to something else."""
    for name, reference in {**manifest.inputs, **manifest.outputs}.items():
        try:
            read_manifest(reference)
        except StoreError as error:
            gone = not Location(reference.uri).exists(MANIFEST)
            owns_rows = manifest.kind == StageKind.COLLECT  # re-scored: its rows are its own
            if gone and (reference.kind == StageKind.CHECKPOINT or owns_rows):
                continue
            yield StoreProblem(location.uri, f"its {name} differs from its source: {error}", redo)


_CHECKPOINT = re.compile(r"(?P<run>(?:(?:runs|replays)/[^/]+/)?)checkpoints/(?P<version>\d+)/(?P<file>.+)")
_KEPT_NAMES = re.compile(r"^(attempt-\d+\.json|manifest\.json)$")
CUT_OFF_SECONDS = 86_400.0
"""A temporary file that is older is of a write that was cut off."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file that can go."""

    name: str
    """Relative to the store."""
    reason: str


def find_garbage(store: str) -> list[Garbage]:
    """Return all garbage of a store by name.

    Raises:
        StoreError: a manifest cannot be read, so the files of its stage are unknown. `store verify` has the details.
    """
    root = Location(store)
    names = root.tree()
    cut_off = root.cut_off_writes(names, CUT_OFF_SECONDS)
    by_name = {name: Garbage(name, "temporary file of an interrupted write") for name in cut_off}
    placed = [name for name in names if not is_temporary(name)]
    for garbage in (*_unnamed(root, placed), *_half_deleted_checkpoints(root, placed)):
        by_name.setdefault(garbage.name, garbage)
    return [by_name[name] for name in sorted(by_name)]


def collect_garbage(store: str, garbage: Iterable[Garbage]) -> int:
    """Delete garbage and return the number of deleted files.

    A manifest that appeared in the meantime changes nothing, because manifests never change.
    """
    root = Location(store)
    count = 0
    for item in garbage:
        root.delete_object(item.name)
        count += 1
    return count


def _unnamed(root: Location, names: list[str]) -> Iterator[Garbage]:
    stages = {name.removesuffix(MANIFEST) for name in names if name.endswith(f"/{MANIFEST}")}
    started = {name.rsplit("/", 1)[0] + "/" for name in names if name.rsplit("/", 1)[-1].startswith("attempt-")}
    names_by_stage: dict[str, set[str]] = {}
    for stage in stages:
        try:
            manifest = Manifest.model_validate_json(root.read(f"{stage}{MANIFEST}"))
        except NotFound:
            continue  # listed late, deleted since: an unfinished stage's files are nobody's garbage
        except ValueError as error:
            raise StoreError(
                f"{root.uri}/{stage}{MANIFEST} cannot be read: {error}. Run `roundhouse store verify`."
            ) from error
        names_by_stage[stage] = {entry.path for entry in manifest.files}
    for name in names:
        parts = name.split("/")
        above = ("/".join(parts[:depth]) + "/" for depth in range(len(parts) - 1, 0, -1))
        owner = next(
            (directory for directory in above if directory in stages | started), None
        )  # at whatever depth the file lies
        if owner is None or owner not in names_by_stage:
            continue
        file = name.removeprefix(owner)
        if file not in names_by_stage[owner] and not _KEPT_NAMES.match(file):
            yield Garbage(name, "no manifest names it: an attempt that was interrupted or lost")


def _half_deleted_checkpoints(root: Location, names: list[str]) -> Iterator[Garbage]:
    """Files of versions without a manifest below the newest complete version. Above it, one may just be being written. Whether
    there is a manifest is asked of the object: a listing may be late."""
    newest: dict[str, int] = {}
    complete: set[tuple[str, int]] = set()
    members = [match for name in names if (match := _CHECKPOINT.fullmatch(name)) is not None]
    for match in members:
        if match["file"] == MANIFEST:
            complete.add((match["run"], int(match["version"])))
            newest[match["run"]] = max(newest.get(match["run"], -1), int(match["version"]))
    older = {(m["run"], int(m["version"])): m for m in members if int(m["version"]) < newest.get(m["run"], -1)}
    for place, match in older.items():
        if place not in complete and root.exists(f"{match['run']}checkpoints/{match['version']}/{MANIFEST}"):
            complete.add(place)
    for match in members:
        run, version = match["run"], int(match["version"])
        if (run, version) in older and (run, version) not in complete:
            yield Garbage(match.string, f"rest of checkpoint {version}, which retention deleted")
