"""One iteration: from version k-1 to version k."""

from __future__ import annotations

from prefect import flow

from flows._prefect.tuning import OpaqueConfig, untagged_tasks
from roundhouse.config.models import RunConfig
from roundhouse.errors import StoreError
from roundhouse.store.manifest import Reference
from roundhouse.store.run import open_run
from tasks.checkpoint import checkpoint
from tasks.collect import collect
from tasks.evaluate import evaluate, promote
from tasks.refit import refit
from tasks.report import report_iteration
from tasks.train import train_step
from tasks.validate import validate


@flow(
    name="iteration", flow_run_name="{config.run_id} iteration {k:04d}", persist_result=True, result_serializer="json"
)
def iteration(config: OpaqueConfig, k: int) -> Reference:
    """Refit, collect, validate, train, checkpoint, and every N iterations evaluate."""
    run = open_run(config)
    base = run.checkpoint(k - 1).reference()
    if base is None:
        raise StoreError(f"iteration {k} needs the checkpoint of version {k - 1}, which is not complete")

    with untagged_tasks():
        weights = refit(run, k, base)
        rollouts = collect(run, k, weights)
        sequences = validate(run, k, rollouts)
        update = train_step(run, k, sequences, base)
        published = checkpoint(run, update)
        if is_evaluated(config, k):
            evaluate(run, published)
            promote(run, k)
        report_iteration(run, k)
    return published


def is_evaluated(config: RunConfig, k: int) -> bool:
    """Whether version k is evaluated: the last, and others every `evaluation.every`; none where that is null."""
    every = config.evaluation.every
    return every is not None and (k == config.iterations or (every > 0 and k % every == 0))
