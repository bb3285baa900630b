"""Task: publish the version that training made, and let go of the ones no longer kept."""

from __future__ import annotations

from roundhouse.stages.checkpoint import publish, retain
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="checkpoint", task_run_name="checkpoint {update.iteration}")
def checkpoint(run: Run, update: Reference) -> Reference:
    published = publish(run, update)
    retain(run, published.policy_version)
    return published
