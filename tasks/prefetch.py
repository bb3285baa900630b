"""Tasks of the generation loop: collect an iteration ahead of its training, and bring the engine to a version beside it."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from roundhouse.collection.in_process_runner import InProcessRunner
from roundhouse.collection.overlap import StepBatch
from roundhouse.collection.shard_runner import ShardRunner
from roundhouse.progress import announce
from roundhouse.stages import prefetch as stage
from roundhouse.stages.prefetch_shards import prefetch_shards
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="collect", task_run_name="collect {iteration}")
def prefetch_rollouts(run: Run, iteration: int, runner: InProcessRunner | ShardRunner) -> Reference | State[Any]:
    """The collect stage, made by the loop's rollouts; cancelled when the loop ends before."""
    return _rolled_out(run, iteration, runner)


def _rolled_out(run: Run, iteration: int, runner: InProcessRunner | ShardRunner) -> Reference | State[Any]:
    def progress(finished: int, planned: int) -> None:
        announce("collect", iteration=iteration, finished=finished, planned=planned)

    if isinstance(runner, ShardRunner):
        reference = prefetch_shards(run, iteration, runner, progress)
    else:
        reference = stage.prefetch_rollouts(run, iteration, runner, progress)
    return reference or Cancelled(message="The loops were ended. What had finished is kept, and goes on with the run.")


@stage_task(name="generate", task_run_name="generate {iteration}")
def generate_rollouts(run: Run, iteration: int, runner: InProcessRunner | ShardRunner) -> Reference | State[Any]:
    """The same of an iteration whose groups any step of the window may train on."""
    return _rolled_out(run, iteration, runner)


@stage_task(name="collect", task_run_name="collect {iteration}")
def collect_chosen(run: Run, iteration: int, runner: InProcessRunner | ShardRunner, batch: StepBatch) -> Reference:
    """The collect stage, from what was generated."""
    return stage.collect_chosen(run, iteration, runner, batch)


@stage_task(name="refit", task_run_name="refit to version {checkpoint.policy_version}")
def transfer(run: Run, checkpoint: Reference) -> None:
    stage.transfer(run, checkpoint)
