"""The pointer to the version of a run that is the one to use. What it points to is decided in `roundhouse.stages.promotion`."""

from __future__ import annotations

from roundhouse.errors import ConfigError
from roundhouse.store.location import NotFound
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run

POINTER = "promoted.json"


class Promoted(Reference):
    """The promoted version's checkpoint."""

    approval: str | None = None
    """Who agreed, with what comment; None where nobody was asked."""


def promoted_version(run: Run) -> int | None:
    """The promoted version; None before the first evaluation."""
    try:
        return Promoted.model_validate_json(run.location.read(POINTER)).policy_version
    except NotFound:
        return None


def promoted_checkpoint(run: Run) -> Reference | None:
    """Its checkpoint."""
    version = promoted_version(run)
    return None if version is None else run.checkpoint(version).reference()


def version_named(run: Run, name: str) -> int:
    """The version that `newest`, `promoted` or a number means.

    Raises:
        ConfigError: nothing is promoted or made yet, or it is neither of these.
    """
    if name.isdecimal():
        return int(name)
    if name == "promoted":
        if (promoted := promoted_version(run)) is None:
            raise ConfigError(
                f"Run {run.run_id!r} has no promoted checkpoint: no version was evaluated, or promotion is off "
                "(evaluation.promotion_confidence). Name newest or a version, or evaluate it: roundhouse evaluate."
            )
        return promoted
    if name != "newest":
        raise ConfigError(f"{name!r} names no checkpoint: newest, promoted or the number of a version.")
    if (newest := run.latest_checkpoint()) is None:
        raise ConfigError(f"Run {run.run_id!r} has no checkpoint yet.")
    return newest.policy_version


def point_to_promoted(run: Run, version: int, approval: str | None = None) -> None:
    """Move the pointer, never back: a repeated start passes by older decisions again."""
    current, checkpoint = promoted_version(run), run.checkpoint(version).reference()
    if checkpoint is not None and (current is None or current < version):
        promoted = Promoted(**checkpoint.model_dump(), approval=approval)
        run.refuse_lost_lease()
        run.location.write(POINTER, promoted.model_dump_json(indent=1).encode())
