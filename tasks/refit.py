"""Tasks: start the engine, and bring every replica of it to a policy version."""

from __future__ import annotations

from prefect import task

from roundhouse.stages import refit as stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import STAGE


@task(name="engine", task_run_name="start engine", **STAGE)
def start_engine(run: Run) -> None:
    """Ask for the engine, without waiting for it."""
    stage.start_engine(run)


@task(name="refit", task_run_name="refit to version {checkpoint.policy_version}", **STAGE)
def refit(run: Run, iteration: int, checkpoint: Reference) -> Reference:
    return stage.refit_iteration(run, iteration, checkpoint)


@task(name="refit-to", task_run_name="refit to version {checkpoint.policy_version}", **STAGE)
def refit_to(run: Run, checkpoint: Reference) -> None:
    """Refit outside an iteration."""
    stage.ensure_version(run, checkpoint)
