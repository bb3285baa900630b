"""What a store can do without: files that no manifest names and nothing will ever read.

Invariant: nothing that a run needs is garbage. Garbage is a file beside a manifest that the manifest does not name (a part of
an attempt that lost, or was interrupted and done again), a checkpoint directory without a manifest that is older than the
newest checkpoint (retention was interrupted while it deleted), and the temporary file of a write that was cut off: one that
has not changed for a day, for a write that is under way has such a file too. The parts of an unfinished stage are not garbage:
the run goes on with them. The record of an attempt is not either; it is history.

    collect/   manifest.json  attempt-0001.json  attempt-0002.json  rollouts-a0002-00000.parquet     kept
               rollouts-a0001-00000.parquet                                                          garbage
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from roundhouse.errors import StoreError
from roundhouse.store.disk import is_temporary
from roundhouse.store.location import Location, NotFound
from roundhouse.store.manifest import MANIFEST, Manifest

_CHECKPOINT = re.compile(r"(?P<run>(?:runs/[^/]+/)?)checkpoints/(?P<version>\d+)/(?P<file>.+)")
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
    """All garbage of a store, by name.

    Raises:
        StoreError: a manifest cannot be read; what belongs to its stage is not known then. `store verify` says more.
    """
    root = Location(store)
    names = root.tree()
    cut_off = root.cut_off_writes(names, CUT_OFF_SECONDS)
    found = {name: Garbage(name, "temporary file of an interrupted write") for name in cut_off}
    placed = [name for name in names if not is_temporary(name)]
    for garbage in (*_unnamed(root, placed), *_half_deleted_checkpoints(root, placed)):
        found.setdefault(garbage.name, garbage)
    return [found[name] for name in sorted(found)]


def collect_garbage(store: str, garbage: Iterable[Garbage]) -> int:
    """Delete it; how many files went.

    A stage whose manifest appeared meanwhile names its files itself: what is garbage stays garbage, since manifests never
    change.
    """
    root = Location(store)
    count = 0
    for item in garbage:
        root.delete_object(item.name)
        count += 1
    return count


def _unnamed(root: Location, names: list[str]) -> Iterator[Garbage]:
    stages = {name.removesuffix(MANIFEST) for name in names if name.endswith(f"/{MANIFEST}")}
    kept: dict[str, set[str]] = {}
    for stage in stages:
        try:
            manifest = Manifest.model_validate_json(root.read(f"{stage}{MANIFEST}"))
        except NotFound:
            continue  # listed late, deleted since: an unfinished stage's files are nobody's garbage
        except ValueError as error:
            raise StoreError(
                f"{root.uri}/{stage}{MANIFEST} cannot be read: {error}. Run `roundhouse store verify`."
            ) from error
        kept[stage] = {entry.path for entry in manifest.files}
    for name in names:
        owner = _stage_of(name, stages)
        if owner is None or owner not in kept:
            continue
        file = name.removeprefix(owner)
        if file not in kept[owner] and not _KEPT_NAMES.match(file):
            yield Garbage(name, "no manifest names it: an attempt that was interrupted or lost")


def _stage_of(name: str, stages: set[str]) -> str | None:
    """The complete stage that a file lies in, at whatever depth."""
    parts = name.split("/")
    for depth in range(len(parts) - 1, 0, -1):
        if (directory := "/".join(parts[:depth]) + "/") in stages:
            return directory
    return None


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
