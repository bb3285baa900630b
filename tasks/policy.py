"""Task: make or fetch the starting policy, version 0."""

from __future__ import annotations

from prefect import task

from roundhouse.stages.policy import starting_policy as make
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import STAGE


@task(name="starting-policy", task_run_name="starting policy", **STAGE)
def starting_policy(run: Run) -> Reference:
    return make(run)
