"""A training run: the starting policy, then iteration after iteration, each durable on its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from prefect import Flow, flow

from roundhouse.config.defaults import rate_notes
from roundhouse.config.models import RunConfig
from roundhouse.stages.collect import with_epochs
from roundhouse.stages.machine_fit import policy_notes
from roundhouse.stages.offline import with_iterations
from roundhouse.stages.preflight import refuse_unknown_metric, refuse_unready
from roundhouse.stages.refit import awake_at_end, own_gym
from roundhouse.stages.report import reaches_target
from roundhouse.stages.task_survey import input_digests, task_warnings
from roundhouse.stages.trainer_home import trainer_released_at_end
from roundhouse.store.lease import driving
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse_flows._prefect.reruns import is_first_start
from roundhouse_flows._prefect.signals import redeliver_lost_signals
from roundhouse_flows._prefect.tuning import OpaqueConfig, forget_results, untagged_tasks, without_heartbeats
from roundhouse_flows.between_iterations import after_last_iteration, before_iteration
from roundhouse_flows.engine_end import engine_released_at_end
from roundhouse_flows.iteration import carry_out, has_engine, source_of
from roundhouse_flows.prefect_log import reports_to_prefect
from roundhouse_tasks.health import heartbeat
from roundhouse_tasks.report import finish_run, finished_summary, report_iteration, tracked
from roundhouse_tasks.stages import evaluate, prepare_offline, promote, start_engine, starting_policy

log = logging.getLogger(__name__)


@flow(name="train", flow_run_name="train {config.run_id}", persist_result=True, result_serializer="json")
def train(config: OpaqueConfig) -> dict[str, Any]:
    """Train a policy with GRPO. A new start under the same run ID continues after the last complete stage."""
    refuse_unready(config)
    run = with_epochs(_opened(config))
    if (summary := finished_summary(run)) is not None:
        return summary
    with _driven(run):
        if not run.is_reported(run.config.iterations):
            start_engine(run)  # it loads while MLflow is imported and the starting policy made
        with own_gym(run):
            return _iterate(run, starting_policy(run))


@flow(
    name="train-offline", flow_run_name="train-offline {config.run_id}", persist_result=True, result_serializer="json"
)
def train_offline(config: OpaqueConfig) -> dict[str, Any]:
    """Train a policy from collected datasets; only evaluation needs an engine. A new start continues as `train` does."""
    refuse_unknown_metric(config)
    run = with_iterations(_opened(config))
    if (summary := finished_summary(run)) is not None:
        return summary
    with _driven(run):
        start = starting_policy(run)
        prepare_offline(run, start)
        if has_engine(run.config) and not run.is_reported(run.config.iterations):
            start_engine(run)
            with own_gym(run):
                return _iterate(run, start)
        return _iterate(run, start)


def _opened(config: RunConfig) -> Run:
    """Return the run; a first start compares its task rows and user code with the record, and logs warnings about them."""
    if not is_first_start():
        return open_run(config)
    run = open_run(config, first_start=True, inputs=input_digests(config))
    for note in [*rate_notes(run.config), *policy_notes(run.config)]:
        log.info("%s", note)
    for warning in task_warnings(config):
        log.warning("%s", warning)
    return run


def training_flow(config: RunConfig) -> Flow[[RunConfig], dict[str, Any]]:
    """The flow that trains a run of this configuration."""
    return train if config.offline is None else train_offline


@contextmanager
def _driven(run: Run) -> Iterator[None]:
    """Context of a training run: this process alone drives it, and shows its state."""
    with (
        driving(run.location),
        untagged_tasks(),
        without_heartbeats(),
        redeliver_lost_signals(),
        reports_to_prefect(run.config.iterations),
        tracked(run),
        heartbeat(run),
        engine_released_at_end(run),
        awake_at_end(run),
        trainer_released_at_end(run),
    ):
        yield


def _iterate(run: Run, start: Reference) -> dict[str, Any]:
    """Evaluate the starting policy, make the iterations that are missing, and finish the run."""
    config = run.config
    if not run.is_reported(run.first_version):
        if has_engine(config) and config.evaluation.before_training:
            evaluate(run, start)
            promote(run, run.first_version)
        report_iteration(run, run.first_version)
    with source_of(run):
        for k in range(next_iteration(run), config.iterations + 1):
            if reaches_target(run, k - 1):
                end = config.finish
                log.info("the run ends with iteration %d: %s is at least %g", k - 1, end.metric, end.at_least)
                run = replace(run, config=config.model_copy(update={"iterations": k - 1}))
                break
            before_iteration(run, k)
            carry_out(run, k)
            forget_results()
    after_last_iteration(run)
    return finish_run(run)


def next_iteration(run: Run) -> int:
    """Return the first iteration without a stored report."""
    latest = run.latest_checkpoint()
    version = run.first_version if latest is None else latest.policy_version
    return version + 1 if run.is_reported(version) else max(version, run.first_version + 1)
