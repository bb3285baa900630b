"""Datasets that outlive a run: `<store>/datasets/<name>/<version>`, by hand or every night.

    datasets/nightly/20261121T020000Z-v000012/     collected for the moment 2026-11-21 02:00 UTC with policy version 12
    datasets/offline/v000012-i000001/              collected by hand: version 12, draw 1

Invariants: a moment has at most one complete version of a dataset, however often its collection is started; all rollouts of a
version are of one policy version; retention takes the manifest away before any file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from roundhouse.store.location import Location
from roundhouse.store.manifest import MANIFEST, Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import Stage, read_manifest

_MOMENT = re.compile(r"(?P<stamp>\d{8}T\d{6}Z)-v(?P<version>\d{6,})")


@dataclass(frozen=True)
class Draw:
    """What is collected: which tasks and seeds, under which version's name."""

    iteration: int
    """Selects tasks and seeds, as an iteration of training does."""
    moment: datetime | None = None
    """The planned moment of a scheduled collection."""

    @classmethod
    def of_moment(cls, moment: datetime) -> Draw:
        """A draw of its own for each moment; minutes are told apart."""
        return cls(int(moment.timestamp()) // 60, moment)

    def label(self, version: int) -> str:
        """The dataset version's name."""
        if self.moment is None:
            return f"v{version:06d}-i{self.iteration:06d}"
        return f"{stamp(self.moment)}-v{version:06d}"


def stamp(moment: datetime) -> str:
    """A moment as part of a name."""
    return f"{moment.astimezone(UTC):%Y%m%dT%H%M%SZ}"


def dataset_versions(store: str, name: str) -> list[Reference]:
    """The complete versions of a dataset, oldest first by the moment at which they were finished."""
    root = Location(store) / f"datasets/{name}"
    found = [Stage(root / label, kind="collect", run_id="", iteration=0).reference() for label in root.names()]
    whole = [reference for reference in found if reference is not None]
    return sorted(whole, key=lambda reference: read_manifest(reference).finished_at)


def collected_moments(store: str, name: str) -> set[str]:
    """Stamps of the moments that have a complete version."""
    labels = [reference.uri.rsplit("/", 1)[-1] for reference in dataset_versions(store, name)]
    return {match["stamp"] for label in labels if (match := _MOMENT.fullmatch(label)) is not None}


def version_for(run: Run, name: str, draw: Draw, wanted: int | None) -> int | None:
    """The policy version to collect with: the one with which this moment was collected or begun, else the one wanted (None:
    the newest). So a collection that is tried again mixes no versions, though training went on meanwhile."""
    if draw.moment is None:
        return wanted
    begun = None
    for label in (Location(run.config.store) / f"datasets/{name}").names():
        match = _MOMENT.fullmatch(label)
        if match is None or match["stamp"] != stamp(draw.moment):
            continue
        version = int(match["version"])
        if dataset_stage(run, name, label, draw).reference() is not None:
            return version
        if run.checkpoint(version).reference() is not None:
            begun = version
    return wanted if begun is None else begun


def dataset_stage(run: Run, name: str, label: str, draw: Draw) -> Stage:
    """The stage of a dataset's version."""
    place = Location(run.config.store) / f"datasets/{name}/{label}"
    return Stage(place, kind="collect", run_id=run.run_id, iteration=draw.iteration)


def retain_versions(store: str, name: str, keep_last: int) -> list[str]:
    """Delete all but the newest complete versions; their URIs. What is unfinished stays."""
    deleted = []
    for reference in dataset_versions(store, name)[:-keep_last]:
        location = Location(reference.uri)
        location.delete(MANIFEST)
        location.delete_tree()
        deleted.append(reference.uri)
    return deleted
