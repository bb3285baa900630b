"""A person's answer about a promotion, as MLflow shows it: a tag of the run and of the model version, and the alias."""

from __future__ import annotations

import logging
import os

from roundhouse.stages.approval import Answer
from roundhouse.store.run import Run
from roundhouse.tracking.registry import UID_TAG, register_checkpoint, registered_version

log = logging.getLogger(__name__)

TAG = "roundhouse.approval"


def tell_mlflow(run: Run, version: int, answer: Answer) -> None:
    """Show the answer. A server that is away costs a warning: the alias follows with the next registration."""
    uri = run.config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not run.config.tracking.enabled or uri is None:
        return
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    try:
        experiment = client.get_experiment_by_name(run.config.tracking.experiment)
        ids = [] if experiment is None else [experiment.experiment_id]
        found = client.search_runs(ids, f"tags.`{UID_TAG}` = '{run.uid}'", max_results=1) if ids else []
        if not found:
            return
        client.set_tag(found[0].info.run_id, f"{TAG}.{version}", str(answer))
        name = register_checkpoint(client, run, version, found[0].info.run_id)
        if name is not None and (registered := registered_version(client, name, run, version)) is not None:
            client.set_model_version_tag(name, registered.version, TAG, str(answer))
    except MlflowException as error:
        log.warning("MLflow was not told of the answer about version %d (%s); the store has it", version, error)
