"""Task: one training step."""

from __future__ import annotations

from prefect import get_run_logger

from roundhouse.stages.policy import checkpoint_cache
from roundhouse.stages.train import train_iteration
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="train", task_run_name="train {iteration}")
def train_step(run: Run, iteration: int, sequences: Reference, base: Reference) -> Reference:
    say = get_run_logger().info  # a Job's log is the task's
    return train_iteration(run, iteration, sequences, base, checkpoint_cache(run.config), say)
