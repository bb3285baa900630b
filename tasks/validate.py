"""Task: prove the tokens of an iteration, and set aside what cannot be proved."""

from __future__ import annotations

from roundhouse.stages.policy import vocabulary_size
from roundhouse.stages.validate import validate_iteration
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="validate", task_run_name="validate {iteration}")
def validate(run: Run, iteration: int, rollouts: Reference) -> Reference:
    return validate_iteration(run, iteration, rollouts, vocabulary_size(run))
