"""One stage of a checkpoint, outside any training run: collect a dataset, evaluate on held-out tasks."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from prefect import flow

from roundhouse.stages.datasets import TaskDraw, dataset_stage, open_to_collect, retain_versions, version_for
from roundhouse.stages.refit import own_gym
from roundhouse.stages.task_survey import input_digests
from roundhouse.store.run import Run, no_such_version, open_run, version_named
from roundhouse.store.stage import Reference
from roundhouse_flows._prefect.signals import redeliver_lost_signals
from roundhouse_flows._prefect.tuning import OpaqueConfig, untagged_tasks
from roundhouse_flows.engine_end import engine_released_after_use
from roundhouse_tasks.stages import collect_dataset, refit_to, starting_policy
from roundhouse_tasks.stages import evaluate as evaluate_stage


@flow(name="collect", flow_run_name="collect {name} of {config.run_id}", persist_result=True, result_serializer="json")
def collect(
    config: OpaqueConfig,
    name: str = "offline",
    iteration: int = 1,
    version: int | None = None,
    moment: datetime | None = None,
    keep_last: int | None = None,
    checkpoint: Literal["newest", "promoted"] = "newest",
    keep_days: float | None = None,
) -> Reference:
    """Collect rollouts into `datasets/<name>/<version>` without training on them.

    Args:
        iteration: the draw of tasks, without a moment.
        version: of the policy; by default, `checkpoint` selects it.
        moment: that this collection is for. It names the dataset's version, which is collected once.
        keep_last, keep_days: delete the versions of the dataset that neither keeps afterwards (`retain_versions`).
        checkpoint: the newest, or the promoted one; decided at the first attempt, and not again.
    """
    run = open_to_collect(config)
    draw = TaskDraw(iteration) if moment is None else TaskDraw.of_moment(moment)
    with untagged_tasks(), redeliver_lost_signals():
        start = starting_policy(run)
        collected = _collect(run, name, draw, version, start, checkpoint)
    retain_versions(config.store, name, keep_last, keep_days)
    return collected


def _collect(
    run: Run, name: str, draw: TaskDraw, wanted: int | None, start: Reference, named: Literal["newest", "promoted"]
) -> Reference:
    version = version_for(run, name, draw, wanted)
    if version is None and named == "promoted":
        version = version_named(run, named)
    if (
        version is not None
        and (reference := dataset_stage(run, name, draw.label(version), draw).reference()) is not None
    ):
        return reference
    checkpoint = (run.latest_checkpoint() or start) if version is None else run.checkpoint(version).reference()
    if checkpoint is None:
        raise no_such_version(run, version)
    with engine_released_after_use(run):
        refit_to(run, checkpoint)
        with own_gym(run):
            return collect_dataset(run, name, draw, checkpoint)


@flow(name="evaluate", flow_run_name="evaluate {config.run_id}", persist_result=True, result_serializer="json")
def evaluate(config: OpaqueConfig, version: int | None = None) -> Reference:
    """Evaluate a version on held-out tasks, by default the newest."""
    run = open_run(config, inputs=input_digests(config))
    with untagged_tasks(), redeliver_lost_signals():
        start = starting_policy(run)
        checkpoint = (run.latest_checkpoint() or start) if version is None else run.checkpoint(version).reference()
        if checkpoint is None:
            raise no_such_version(run, version)
        with engine_released_after_use(run), own_gym(run):
            return evaluate_stage(run, checkpoint)
