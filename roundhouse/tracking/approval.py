"""A person's answer about a promotion, as MLflow shows it: a tag of the run and of the model version, and the alias."""

from __future__ import annotations

import logging

from roundhouse.store.run import Run
from roundhouse.tracking.mlflow import client_of, server_of
from roundhouse.tracking.registry import UID_TAG, register_checkpoint

log = logging.getLogger(__name__)


def tell_mlflow(run: Run, version: int) -> None:
    """Show the answer. A server that is away costs a warning: the alias follows with the next registration."""
    uri = server_of(run)
    if not run.config.tracking.enabled or uri is None:
        return
    from mlflow.exceptions import MlflowException

    client = client_of(uri)
    try:
        experiment = client.get_experiment_by_name(run.config.tracking.experiment)
        ids = [] if experiment is None else [experiment.experiment_id]
        found = client.search_runs(ids, f"tags.`{UID_TAG}` = '{run.uid}'", max_results=1) if ids else []
        if not found:
            return
        register_checkpoint(client, run, version, found[0].info.run_id)
    except MlflowException as error:
        log.warning("MLflow was not told of the answer about version %d (%s); the store has it", version, error)
