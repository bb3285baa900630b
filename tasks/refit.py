"""Tasks: start the engine, and bring every replica of it to a policy version."""

from __future__ import annotations

from roundhouse.stages import refit as stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="engine", task_run_name="start engine")
def start_engine(run: Run) -> None:
    """Ask for the engine, without waiting for it."""
    stage.start_engine(run)


@stage_task(name="refit", task_run_name="refit to version {checkpoint.policy_version}")
def refit(run: Run, iteration: int, checkpoint: Reference) -> Reference:
    return stage.refit_iteration(run, iteration, checkpoint)


@stage_task(name="refit-to", task_run_name="refit to version {checkpoint.policy_version}")
def refit_to(run: Run, checkpoint: Reference) -> None:
    """Refit outside an iteration."""
    stage.ensure_version(run, checkpoint)
