"""The frozen model beside the policy: the run's own version 0, or a teacher from outside the run."""

from __future__ import annotations

from pathlib import Path

from roundhouse.errors import ConfigError
from roundhouse.store.directories import local_directory, plain_directory
from roundhouse.store.location import Location
from roundhouse.store.manifest import Reference, model_location
from roundhouse.store.run import Run


def reference_origin(run: Run) -> Reference | str | None:
    """The model that the run's algorithm compares the policy with: a checkpoint, a URI, or None when it needs none.

    Raises:
        ConfigError: the teacher's directory is not there.
    """
    source = run.config.train.algorithm.reference_source
    if source is None:
        return None
    if source == "start":
        start = run.checkpoint(0).reference()
        assert start is not None, "a run that trains has its starting policy"
        return start
    teacher = model_location(Location(source))
    if "config.json" not in teacher.tree():
        raise ConfigError(
            f"train.algorithm.teacher: {teacher.uri} has no config.json. Give a Hugging Face model directory."
        )
    return teacher.uri


def reference_directory(run: Run, cache: Path) -> Path | None:
    """Its directory on this machine."""
    origin = reference_origin(run)
    if isinstance(origin, Reference):
        return local_directory(origin, cache)
    return None if origin is None else plain_directory(Location(origin), cache)
