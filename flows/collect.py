"""Offline collection: rollouts of a checkpoint, as a dataset that outlives the run."""

from __future__ import annotations

from datetime import datetime

from prefect import flow

from flows.economy import untagged_tasks
from roundhouse.config.models import RunConfig
from roundhouse.errors import StoreError
from roundhouse.stages.datasets import Draw, dataset_stage, retain_versions, version_for
from roundhouse.store.manifest import Reference
from roundhouse.store.run import Run, open_run
from tasks.collect import collect_dataset
from tasks.policy import starting_policy
from tasks.refit import refit_to


@flow(name="collect", flow_run_name="collect {name} of {config.run_id}", persist_result=True, result_serializer="json")
def collect(
    config: RunConfig,
    name: str = "offline",
    iteration: int = 1,
    version: int | None = None,
    moment: datetime | None = None,
    keep_last: int | None = None,
) -> Reference:
    """Collect rollouts into `datasets/<name>/<version>` without training on them.

    Args:
        iteration: the draw of tasks, where no moment is given.
        version: of the policy; the newest when left out.
        moment: that this collection is for. It names the dataset's version, which is collected once.
        keep_last: delete all but so many newest versions of the dataset afterwards.
    """
    run = open_run(config)
    draw = Draw(iteration) if moment is None else Draw.of_moment(moment)
    with untagged_tasks():
        start = starting_policy(run)
        collected = _collect(run, name, draw, version, start)
    if keep_last is not None:
        retain_versions(config.store, name, keep_last)
    return collected


def _collect(run: Run, name: str, draw: Draw, wanted: int | None, start: Reference) -> Reference:
    version = version_for(run, name, draw, wanted)
    if version is not None and (done := dataset_stage(run, name, draw.label(version), draw).reference()) is not None:
        return done
    checkpoint = (run.latest_checkpoint() or start) if version is None else run.checkpoint(version).reference()
    if checkpoint is None:
        raise StoreError(f"run {run.run_id} has no checkpoint {version}; it has {run.checkpoint_versions()}")
    refit_to(run, checkpoint)
    return collect_dataset(run, name, draw, checkpoint)
