"""Datasets that outlive a run: `<store>/datasets/<name>/<version>`, by hand or every night.

    datasets/nightly/20261121T020000Z-v000012/     collected for the moment 2026-11-21 02:00 UTC with policy version 12
    datasets/offline/v000012-i000001/              collected by hand: version 12, draw 1

Invariants: a moment has at most one complete version of a dataset, however often its collection is started; all rollouts of a
version are of one policy version; retention takes the manifest away before any file, and takes nothing that a run or a
replay of the store trains from.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from roundhouse.config.loading import differences
from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError
from roundhouse.store.lineage import FIXED_BY_CHECKPOINT, read_identity
from roundhouse.store.location import Location, NotFound
from roundhouse.store.run import Run, load_run, open_run, run_exists
from roundhouse.store.stage import MANIFEST, Reference, Stage, StageKind, read_manifest

DAY = 86400.0
_MOMENT = re.compile(r"(?P<stamp>\d{8}T\d{6}Z)-v(?P<version>\d{6,})")


@dataclass(frozen=True)
class TaskDraw:
    """A collection's tasks and seeds, and its version name."""

    iteration: int
    """Selects tasks and seeds, as an iteration of training does."""
    moment: datetime | None = None
    """The planned moment of a scheduled collection."""

    @classmethod
    def of_moment(cls, moment: datetime) -> TaskDraw:
        """Return a separate draw for each minute."""
        return cls(int(moment.timestamp()) // 60, moment)

    def label(self, version: int) -> str:
        """The dataset version's name."""
        if self.moment is None:
            return f"v{version:06d}-i{self.iteration:06d}"
        return f"{stamp(self.moment)}-v{version:06d}"


def open_to_collect(config: RunConfig) -> Run:
    """Open the run to collect a dataset with one of its checkpoints; create it if the ID is new.

    A collection outside of training is not part of the run, so tasks, sampling, environment and limits may differ from
    the run's.

    Raises:
        ConfigError: the policy differs.
    """
    if not run_exists(config.store, config.run_id):
        return open_run(config)
    run = load_run(config.store, config.run_id)
    changed = {
        key: pair for key, pair in differences(run.config, config).items() if key.startswith(FIXED_BY_CHECKPOINT)
    }
    if changed:
        lines = "\n".join(f"  {key}: {before!r} -> {after!r}" for key, (before, after) in changed.items())
        raise ConfigError(
            f"Run {config.run_id!r} exists with another policy, which cannot collect for this configuration:\n{lines}\n"
            "Take these changes back; every other key may differ."
        )
    return replace(run, config=config, has_other_inputs=True)


def stamp(moment: datetime) -> str:
    """A moment as part of a name."""
    return f"{moment.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def dataset_versions(store: str, name: str) -> list[Reference]:
    """The complete versions of a dataset, oldest first by the moment at which they were finished."""
    root = Location(store) / f"datasets/{name}"
    references = [
        Stage(root / label, kind=StageKind.COLLECT, run_id="", iteration=0).reference() for label in root.names()
    ]
    whole = [reference for reference in references if reference is not None]
    return sorted(whole, key=lambda reference: read_manifest(reference).finished_at)


def collected_moments(store: str, name: str) -> set[str]:
    """Stamps of the moments that have a complete version."""
    labels = [reference.uri.rsplit("/", 1)[-1] for reference in dataset_versions(store, name)]
    return {match["stamp"] for label in labels if (match := _MOMENT.fullmatch(label)) is not None}


def version_for(run: Run, name: str, draw: TaskDraw, wanted: int | None) -> int | None:
    """The policy version to collect with: the one with which this moment was collected or begun, else the one wanted (None:
    the newest). So a retried collection mixes no versions, even if training continued meanwhile."""
    if draw.moment is None:
        return wanted
    unfinished = None
    for label in (Location(run.config.store) / f"datasets/{name}").names():
        match = _MOMENT.fullmatch(label)
        if match is None or match["stamp"] != stamp(draw.moment):
            continue
        version = int(match["version"])
        if dataset_stage(run, name, label, draw).reference() is not None:
            return version
        if run.checkpoint(version).reference() is not None:
            unfinished = version
    return wanted if unfinished is None else unfinished


def dataset_stage(run: Run, name: str, label: str, draw: TaskDraw) -> Stage:
    """The stage of a dataset's version."""
    place = Location(run.config.store) / f"datasets/{name}/{label}"
    return Stage(place, kind=StageKind.COLLECT, run_id=run.run_id, iteration=draw.iteration)


def dataset_names(store: str) -> list[str]:
    """Names of all datasets of a store."""
    return (Location(store) / "datasets").names()


def users_of_datasets(store: str) -> dict[str, list[str]]:
    """Runs and replays of the store that train, or trained, from a dataset's version, by the version's URI."""
    users: dict[str, list[str]] = {}
    runs, replays = Location(store) / "runs", Location(store) / "replays"
    for run_id in runs.names():
        for reference in _trained_from(runs / run_id):
            users.setdefault(reference.uri, []).append(run_id)
    for name in replays.names():
        for uri in _replayed_from(store, replays / name):
            users.setdefault(uri, []).append(f"replay {name}")
    return users


def retain_versions(
    store: str,
    name: str,
    keep_last: int | None = None,
    keep_days: float | None = None,
    *,
    now: float | None = None,
    dry_run: bool = False,
) -> list[str]:
    """Delete complete versions that nothing keeps, and return their URIs. Incomplete versions stay.

    A version is kept if it is among the `keep_last` newest, younger than `keep_days`, or used for training by a run or
    a replay of the store. The newest version is always kept; with neither number, all are.

    Args:
        now: seconds since the epoch; by default the present time.
        dry_run: only return what would be deleted.
    """
    if keep_last is None and keep_days is None:
        return []
    versions = dataset_versions(store, name)
    oldest = None if keep_days is None else (time.time() if now is None else now) - keep_days * DAY
    candidates = [
        reference
        for reference in versions[: -(keep_last or 1)]
        if oldest is None or read_manifest(reference).finished_at < oldest
    ]
    used = users_of_datasets(store) if candidates else {}
    deleted = [reference.uri for reference in candidates if reference.uri not in used]
    for uri in [] if dry_run else deleted:
        location = Location(uri)
        location.delete(MANIFEST)
        location.delete_tree()
    return deleted


def _replayed_from(store: str, replayed: Location) -> list[str]:
    """URIs of the dataset versions that a replay reads instead of the run's collections; of an unfinished one, too."""
    try:
        request = read_identity(replayed)["replay"]
    except NotFound:
        return []
    source = request["inputs"].get("rollouts", "")
    if "/" in source:
        return [Location(source).uri]
    if not source or source.startswith("iteration:"):
        return []
    first, last = request["iterations"]
    labels = [f"{request['run_id']}-i{k:06d}" for k in range(first, last + 1)]
    return [(Location(store) / f"datasets/{source}/{label}").uri for label in labels]


def _trained_from(run: Location) -> list[Reference]:
    """The dataset versions that a run has fixed; none for a run that collects its own."""
    try:
        identity = read_identity(run)
    except NotFound:
        return []
    if not identity["config"].get("offline"):
        return []
    first = 0 if identity.get("parent") is None else int(identity["parent"]["version"])
    stage = Stage(
        run / f"iterations/{first:06d}/offline", kind=StageKind.OFFLINE, run_id=identity["run_id"], iteration=first
    )
    fixed = stage.reference()
    return [] if fixed is None else list(read_manifest(fixed).inputs.values())
