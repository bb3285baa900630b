"""Tasks of the generation lane: collect an iteration ahead of its training, and bring the engine to a version beside it."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from roundhouse.asynchrony.overlap import Batch
from roundhouse.asynchrony.rolling import Rolling
from roundhouse.asynchrony.rolling_shards import RollingShards
from roundhouse.progress import announce
from roundhouse.stages import collect_ahead as stage
from roundhouse.stages.shards_ahead import collect_shards_ahead
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="collect", task_run_name="collect {iteration}")
def collect_ahead(run: Run, iteration: int, rolling: Rolling | RollingShards) -> Reference | State[Any]:
    """The collect stage, made by the lane's rollouts; cancelled when the lane ends before."""
    return _rolled_out(run, iteration, rolling)


def _rolled_out(run: Run, iteration: int, rolling: Rolling | RollingShards) -> Reference | State[Any]:
    def progress(finished: int, planned: int) -> None:
        announce("collect", iteration=iteration, finished=finished, planned=planned)

    if isinstance(rolling, RollingShards):
        reference = collect_shards_ahead(run, iteration, rolling, progress)
    else:
        reference = stage.collect_ahead(run, iteration, rolling, progress)
    return reference or Cancelled(message="The lanes were ended. What had finished is kept, and goes on with the run.")


@stage_task(name="generate", task_run_name="generate {iteration}")
def generate_ahead(run: Run, iteration: int, rolling: Rolling | RollingShards) -> Reference | State[Any]:
    """The same of an iteration whose groups any step of the window may train on."""
    return _rolled_out(run, iteration, rolling)


@stage_task(name="collect", task_run_name="collect {iteration}")
def collect_chosen(run: Run, iteration: int, rolling: Rolling | RollingShards, batch: Batch) -> Reference:
    """The collect stage, from what was generated."""
    return stage.collect_chosen(run, iteration, rolling, batch)


@stage_task(name="refit", task_run_name="refit to version {checkpoint.policy_version}")
def transfer(run: Run, checkpoint: Reference) -> None:
    stage.transfer(run, checkpoint)
