"""Held-out evaluation of one checkpoint."""

from __future__ import annotations

from prefect import flow

from flows._prefect.signals import redeliver_lost_signals
from flows._prefect.tuning import OpaqueConfig, untagged_tasks
from roundhouse.store.manifest import Reference
from roundhouse.store.run import no_such_version, open_run
from tasks.evaluate import evaluate as evaluate_stage
from tasks.policy import starting_policy


@flow(name="evaluate", flow_run_name="evaluate {config.run_id}", persist_result=True, result_serializer="json")
def evaluate(config: OpaqueConfig, version: int | None = None) -> Reference:
    """Evaluate a version, by default the newest."""
    run = open_run(config)
    with untagged_tasks(), redeliver_lost_signals():
        start = starting_policy(run)
        checkpoint = (run.latest_checkpoint() or start) if version is None else run.checkpoint(version).reference()
        if checkpoint is None:
            raise no_such_version(run, version)
        return evaluate_stage(run, checkpoint)
