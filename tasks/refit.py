"""Task: bring every replica of the engine to a policy version."""

from __future__ import annotations

from prefect import task

from roundhouse.stages import refit as stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import STAGE


@task(name="engine", task_run_name="start engine", **STAGE)
def start_engine(run: Run, skeleton: str) -> None:
    """Start the engine with the policy's architecture, before its weights are there."""
    stage.start_engine(run, skeleton)


@task(name="refit", task_run_name="refit to version {checkpoint.policy_version}", **STAGE)
def refit(run: Run, iteration: int, checkpoint: Reference) -> Reference:
    return stage.refit_iteration(run, iteration, checkpoint)
