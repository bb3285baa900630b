"""Task: make or fetch the starting policy, version 0."""

from __future__ import annotations

from roundhouse.stages.policy import starting_policy as make
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="starting-policy", task_run_name="starting policy")
def starting_policy(run: Run) -> Reference:
    return make(run)
