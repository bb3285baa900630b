"""Offline collection: rollouts of the newest checkpoint, as a dataset that outlives the run."""

from __future__ import annotations

from prefect import flow

from flows.economy import untagged_tasks
from roundhouse.config.models import RunConfig
from roundhouse.store.manifest import Reference
from roundhouse.store.run import open_run
from tasks.collect import collect_dataset
from tasks.policy import starting_policy
from tasks.refit import refit_to


@flow(name="collect", flow_run_name="collect {name} of {config.run_id}", persist_result=True, result_serializer="json")
def collect(config: RunConfig, name: str = "offline", iteration: int = 1) -> Reference:
    """Collect rollouts into `datasets/<name>/v<version>-i<iteration>` without training on them."""
    run = open_run(config)
    with untagged_tasks():
        start = starting_policy(run)
        checkpoint = run.latest_checkpoint() or start
        refit_to(run, checkpoint)
        return collect_dataset(run, name, iteration, checkpoint)
