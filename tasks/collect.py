"""Task: collect the rollouts of an iteration."""

from __future__ import annotations

from roundhouse.progress import announce
from roundhouse.stages.collect import collect_dataset as collect_offline
from roundhouse.stages.collect import collect_iteration
from roundhouse.stages.datasets import TaskDraw
from roundhouse.stages.refit import engine_at
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run
from roundhouse.store.stage import StageKind
from tasks.options import stage_task


@stage_task(name="collect", task_run_name="collect {iteration}")
def collect(run: Run, iteration: int, weights: Reference) -> Reference:
    def progress(finished: int, planned: int) -> None:
        announce("collect", iteration=iteration, finished=finished, planned=planned)

    if (done := run.stage(iteration, StageKind.COLLECT).reference()) is not None:
        return done
    return collect_iteration(run, iteration, weights, engine_at(run, weights.policy_version), progress)


@stage_task(name="collect-dataset", task_run_name="collect {name}")
def collect_dataset(run: Run, name: str, draw: TaskDraw, checkpoint: Reference) -> Reference:
    def progress(finished: int, planned: int) -> None:
        announce("collect", iteration=draw.iteration, finished=finished, planned=planned)

    return collect_offline(run, name, draw, checkpoint, engine_at(run, checkpoint.policy_version), progress)
