"""The pointer to the version of a run that is the one to use. What it points to is decided in `roundhouse.stages.promotion`."""

from __future__ import annotations

from roundhouse.store.location import NotFound
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run

POINTER = "promoted.json"


def promoted_version(run: Run) -> int | None:
    """The promoted version; None before the first evaluation."""
    try:
        return Reference.model_validate_json(run.location.read(POINTER)).policy_version
    except NotFound:
        return None


def promoted_checkpoint(run: Run) -> Reference | None:
    """Its checkpoint."""
    version = promoted_version(run)
    return None if version is None else run.checkpoint(version).reference()


def point_to_promoted(run: Run, version: int) -> None:
    """Move the pointer, never back: a repeated start passes by older decisions again."""
    current, checkpoint = promoted_version(run), run.checkpoint(version).reference()
    if checkpoint is not None and (current is None or current < version):
        run.location.write(POINTER, checkpoint.model_dump_json(indent=1).encode())
