"""Offline training: iterations that learn from collected datasets. Only evaluation needs an engine."""

from __future__ import annotations

from typing import Any

from prefect import Flow, flow

from flows._prefect.reruns import is_first_start
from flows._prefect.signals import redeliver_lost_signals
from flows._prefect.tuning import OpaqueConfig, forget_results, untagged_tasks, without_heartbeats
from flows.between_iterations import after_last_iteration, before_iteration
from flows.iteration import is_evaluated
from flows.prefect_log import reports_to_prefect
from flows.recovery import carry_out
from flows.train import next_iteration, train
from roundhouse.config.models import RunConfig
from roundhouse.errors import StoreError
from roundhouse.stages.offline import with_iterations
from roundhouse.stages.refit import awake_at_end
from roundhouse.store.lease import driving
from roundhouse.store.manifest import Reference
from roundhouse.store.run import open_run
from tasks.checkpoint import checkpoint
from tasks.evaluate import evaluate, promote
from tasks.health import heartbeat
from tasks.offline import prepare_offline, validate_batch
from tasks.policy import starting_policy
from tasks.refit import start_engine
from tasks.report import finish_run, finished_summary, report_iteration, tracked
from tasks.train import train_step


@flow(
    name="train-offline",
    flow_run_name="train-offline {config.run_id}",
    persist_result=True,
    result_serializer="json",
)
def train_offline(config: OpaqueConfig) -> dict[str, Any]:
    """Train a policy from collected datasets. Started again under the same run id, it goes on after the last complete stage."""
    run = with_iterations(open_run(config, first_start=is_first_start()))
    if (summary := finished_summary(run)) is not None:
        return summary
    with (
        driving(run.location),
        untagged_tasks(),
        without_heartbeats(),
        redeliver_lost_signals(),
        reports_to_prefect(run.config.iterations),
        tracked(run),
        heartbeat(run),
        awake_at_end(run),
    ):
        begins = not run.is_reported(run.first_version)
        start = starting_policy(run)
        prepare_offline(run, start)
        evaluates = evaluation_of(run.config)
        if evaluates and not run.is_reported(run.config.iterations):
            start_engine(run)
        if begins:
            if evaluates and config.evaluation.before_training:
                evaluate(run, start)
                promote(run, run.first_version)
            report_iteration(run, run.first_version)
        for k in range(next_iteration(run), run.config.iterations + 1):
            before_iteration(run, k)
            carry_out(run, k, offline_iteration)
            forget_results()
        after_last_iteration(run)
        return finish_run(run)


@flow(
    name="offline-iteration",
    flow_run_name="{config.run_id} iteration {k:04d}",
    persist_result=True,
    result_serializer="json",
)
def offline_iteration(config: OpaqueConfig, k: int) -> Reference:
    """Validate a batch of the datasets, train, checkpoint, and every N iterations evaluate."""
    run = open_run(config)
    base = run.checkpoint(k - 1).reference()
    if base is None:
        raise StoreError(f"iteration {k} needs the checkpoint of version {k - 1}, which is not complete")

    with untagged_tasks():
        sequences = validate_batch(run, k)
        update = train_step(run, k, sequences, base)
        published = checkpoint(run, update)
        if evaluation_of(config) and is_evaluated(config, k):
            evaluate(run, published)
            promote(run, k)
        report_iteration(run, k)
    return published


def evaluation_of(config: RunConfig) -> bool:
    """Whether an offline run evaluates at all."""
    return config.offline is not None and config.offline.evaluate


def training_flow(config: RunConfig) -> Flow[[RunConfig], dict[str, Any]]:
    """The flow that trains a run of this configuration."""
    return train if config.offline is None else train_offline
