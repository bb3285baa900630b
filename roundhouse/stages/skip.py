"""Skip: an iteration that cannot be trained on becomes a version that is the one before, on record.

Invariant: a skipped iteration leaves what any iteration leaves: a train stage, a published version, a report. Its version has
the files of the version before, byte for byte, and its train stage says why. So the next iteration, a restart, an evaluation
and a fork need to know nothing of it, and nobody can take it for a step that was made.
"""

from __future__ import annotations

from roundhouse.health.taxonomy import code_of, kind_of
from roundhouse.stages.checkpoint import publish, recorded
from roundhouse.store.directories import own_place
from roundhouse.store.location import Location
from roundhouse.store.manifest import ModelFiles, Reference
from roundhouse.store.run import Run
from roundhouse.store.skipped import SKIPPED, Skip, skip_of
from roundhouse.store.stage import StageKind, read_manifest


def skip_after(error: BaseException, reason: str) -> Skip:
    """The record of an iteration that is skipped because of this error."""
    return Skip(code_of(error), kind_of(error).value, str(error)[:4000], reason)


def skip_iteration(run: Run, iteration: int, skip: Skip) -> Reference:
    """Publish version `iteration` as a copy of the one before; one that was trained already is published as it is.

    Raises:
        StoreError: the version before is not complete.
    """
    stage = run.stage(iteration, StageKind.TRAIN)
    update = stage.reference()
    if update is None:
        base = run.checkpoint(iteration - 1).reference()
        assert base is not None, "an iteration begins with the checkpoint of the version before"
        attempt = run.begin(stage, policy_version=base.policy_version)
        copied = _copy(base, run.checkpoint(iteration).location, attempt.name)
        update = attempt.commit(
            inputs={"base": base},
            counts={"sequences": 0},
            metrics={"train/skipped": 1.0, "time/compute": 0.0},
            details=recorded(copied)
            | {SKIPPED: {name: getattr(skip, name) for name in ("code", "kind", "error", "reason")}},
        )
    return publish(run, update)


def skipped_in_a_row(run: Run, before: int) -> int:
    """How many iterations right before this one were skipped."""
    count = 0
    while before - count - 1 > run.first_version and skip_of(run, before - count - 1) is not None:
        count += 1
    return count


def _copy(base: Reference, target: Location, attempt: str) -> ModelFiles:
    source, place = Location(base.uri), own_place(attempt)
    files = []
    for name, entry in read_manifest(base).model_files.by_name().items():
        copy = entry.model_copy(update={"path": f"{place}/{name}"})
        target.write(copy.path, source.read(entry.path))  # publishing checks the digests
        files.append(copy)
    return ModelFiles(directory=place, files=files)
