"""Why an iteration was not trained on, as its train stage records it."""

from __future__ import annotations

from dataclasses import dataclass

from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind, read_manifest

SKIPPED = "skipped"
"""In the details of the train stage's manifest, and as metric `train/skipped`."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Why an iteration was not trained on."""

    code: str
    kind: str
    error: str
    reason: str
    """Of the decision (`roundhouse.health.policy`)."""


def skip_of(run: Run, iteration: int) -> Skip | None:
    """Why an iteration was skipped; None when it was not."""
    reference = run.stage(iteration, StageKind.TRAIN).reference()
    details = {} if reference is None else read_manifest(reference).details
    return Skip(**details[SKIPPED]) if SKIPPED in details else None
