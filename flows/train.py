"""A training run: the starting policy, then iteration after iteration, each durable on its own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from prefect import flow

from flows._prefect.reruns import is_first_start
from flows._prefect.signals import redeliver_lost_signals
from flows._prefect.tuning import OpaqueConfig, forget_results, untagged_tasks, without_heartbeats
from flows.between_iterations import after_last_iteration, before_iteration
from flows.iteration import iteration
from flows.overlap import generation_loop, overlapped_iteration
from flows.prefect_log import reports_to_prefect
from flows.recovery import carry_out
from roundhouse.stages.preflight import refuse_unready
from roundhouse.stages.refit import awake_at_end
from roundhouse.store.lease import driving
from roundhouse.store.run import Run, open_run
from tasks.evaluate import evaluate, promote
from tasks.health import heartbeat
from tasks.policy import starting_policy
from tasks.refit import start_engine
from tasks.report import finish_run, finished_summary, report_iteration, tracked


@flow(name="train", flow_run_name="train {config.run_id}", persist_result=True, result_serializer="json")
def train(config: OpaqueConfig) -> dict[str, Any]:
    """Train a policy with GRPO. Started again under the same run id, it goes on after the last complete stage."""
    refuse_unready(config)
    run = open_run(config, first_start=is_first_start())
    if (summary := finished_summary(run)) is not None:
        return summary
    with (
        driving(run.location),
        untagged_tasks(),
        without_heartbeats(),
        redeliver_lost_signals(),
        reports_to_prefect(config.iterations),
        tracked(run),
        heartbeat(run),
        awake_at_end(run),
    ):
        if not run.is_reported(config.iterations):
            start_engine(run)  # it loads while MLflow is imported and the starting policy made
        start = starting_policy(run)
        if not run.is_reported(run.first_version):
            if config.evaluation.before_training:
                evaluate(run, start)
                promote(run, run.first_version)
            report_iteration(run, run.first_version)
        overlapped = config.asynchrony.staleness > 0
        with generation_loop(run) if overlapped else nullcontext():
            for k in range(next_iteration(run), config.iterations + 1):
                before_iteration(run, k)
                carry_out(run, k, by=overlapped_iteration if overlapped else iteration)
                forget_results()
        after_last_iteration(run)
        return finish_run(run)


def next_iteration(run: Run) -> int:
    """The first iteration whose report is not in the store."""
    latest = run.latest_checkpoint()
    version = run.first_version if latest is None else latest.policy_version
    return version + 1 if run.is_reported(version) else max(version, run.first_version + 1)
