"""A training run: the starting policy, then iteration after iteration, each durable on its own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from prefect import flow

from flows.borders import at_border, at_end
from flows.economy import WholeConfig, forget_results, untagged_tasks, without_heartbeats
from flows.iteration import iteration
from flows.overlap import lanes, overlapped_iteration
from flows.prefect_log import told_in_prefect
from flows.recovery import carry_out
from flows.reruns import is_first_start
from flows.termination import repeated_terminations
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
def train(config: WholeConfig) -> dict[str, Any]:
    """Train a policy with GRPO. Started again under the same run id, it goes on after the last complete stage."""
    refuse_unready(config)
    run = open_run(config, first_start=is_first_start())
    if (summary := finished_summary(run)) is not None:
        return summary
    with (
        driving(run.location),
        untagged_tasks(),
        without_heartbeats(),
        repeated_terminations(),
        told_in_prefect(config.iterations),
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
        with lanes(run) if overlapped else nullcontext():
            for k in range(next_iteration(run), config.iterations + 1):
                at_border(run, k)
                carry_out(run, k, by=overlapped_iteration if overlapped else iteration)
                forget_results()
        at_end(run)
        return finish_run(run)


def next_iteration(run: Run) -> int:
    """The first iteration whose report is not in the store."""
    latest = run.latest_checkpoint()
    version = run.first_version if latest is None else latest.policy_version
    return version + 1 if run.is_reported(version) else max(version, run.first_version + 1)
