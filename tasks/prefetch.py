"""Tasks of the generation loop: collect an iteration ahead of its training, and bring the engine to a version meanwhile."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from roundhouse.collection.overlap import StepBatch
from roundhouse.collection.runner import RolloutRunner
from roundhouse.progress import announce
from roundhouse.stages import prefetch as stage
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from tasks.options import stage_task


@stage_task(name="collect", task_run_name="collect {iteration}")
def prefetch_rollouts(run: Run, iteration: int, runner: RolloutRunner[Any]) -> Reference | State[Any]:
    """The collect stage, made by the generation loop; cancelled when the loop ends before."""
    return _prefetch(run, iteration, runner)


@stage_task(name="generate", task_run_name="generate {iteration}")
def generate_rollouts(run: Run, iteration: int, runner: RolloutRunner[Any]) -> Reference | State[Any]:
    """The same of an iteration whose groups any step of the window may train on."""
    return _prefetch(run, iteration, runner)


def _prefetch(run: Run, iteration: int, runner: RolloutRunner[Any]) -> Reference | State[Any]:
    def progress(finished: int, planned: int) -> None:
        announce("collect", iteration=iteration, finished=finished, planned=planned)

    reference = stage.prefetch_rollouts(run, iteration, runner, progress)
    return reference or Cancelled(message="The loops were ended. What had finished is kept; the run resumes with it.")


@stage_task(name="collect", task_run_name="collect {iteration}")
def collect_chosen(run: Run, iteration: int, runner: RolloutRunner[Any], batch: StepBatch) -> Reference:
    """The collect stage, from what was generated."""
    return stage.collect_chosen(run, iteration, runner, batch)


@stage_task(name="refit", task_run_name="refit to version {checkpoint.policy_version}")
def transfer(run: Run, checkpoint: Reference) -> None:
    stage.transfer(run, checkpoint)
