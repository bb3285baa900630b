"""The flows as a person starts them from the Prefect UI, by a schedule or by the API: a form each, then the same flow.

Invariant: a deployment adds only its form, its names and tags, and the local services to a flow. `roundhouse train`
continues its runs, and the other way round.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger
from prefect import tags as tagging
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.runtime import flow_run

from roundhouse.config.models import ResumeConfig, RunConfig
from roundhouse.infra.consents import STATE_VARIABLE, record_consent, refuse_unaccepted_code
from roundhouse.infra.services import services_of
from roundhouse.stages.fork import fork_run
from roundhouse.stages.preflight import refuse_unready
from roundhouse.store.run import load_run, open_run, run_exists
from roundhouse.store.stage import Reference
from roundhouse_flows import approval, on_demand
from roundhouse_flows._prefect.reruns import is_first_start
from roundhouse_flows._prefect.suspension import lasting_suspensions
from roundhouse_flows.forms import (
    ApproveForm,
    CollectForm,
    EvaluateForm,
    ForkForm,
    ReplayForm,
    TrainForm,
    TrainOfflineForm,
    own_configurations,
)
from roundhouse_flows.prefect_log import reports_to_prefect
from roundhouse_flows.train import training_flow

DURABLE: dict[str, Any] = {"persist_result": True, "result_serializer": "json"}


def _train_name() -> str:
    settings = flow_run.parameters["settings"]
    return f"train {settings.run_id or settings.preset}"


@flow(name="train", flow_run_name=_train_name, **DURABLE)
def train(settings: TrainForm) -> dict[str, Any]:
    """Train a policy: a preset and your changes. The same run ID continues the existing run.

    Retry continues a failed run at the failed stage; Cancel ends its processes and leaves it resumable; Suspend takes
    effect at the end of the present stage.
    """
    config = settings.resolve(_state())
    _refuse_unready_start(config)
    open_run(config, first_start=is_first_start())
    record_consent(config)
    return _train(config)


@flow(name="train-offline", flow_run_name="train-offline {settings.new_run_id}", **DURABLE)
def train_offline(settings: TrainOfflineForm) -> dict[str, Any]:
    """A new run that starts from a checkpoint of another and learns from collected datasets instead of fresh rollouts."""
    config = settings.accepted(_state())
    _refuse_unready_start(config)
    fork_run(config)
    return _train(config)


@flow(name="fork", flow_run_name="fork {settings.run_id} as {settings.new_run_id}", **DURABLE)
def fork(settings: ForkForm) -> dict[str, Any]:
    """A new run from an iteration of another: weights, trainer state, and its configuration but for what you change."""
    config = settings.accepted(_state())
    _refuse_unready_start(config)
    fork_run(config)
    return _train(config)


def planned_moment(given: str | None) -> datetime | None:
    """Return the given moment, else the scheduled one of this flow run; None without a plan.

    Prefect sets `expected_start_time` once: it does not change however late the flow run starts or however often it is
    retried.
    """
    if given is not None:
        return datetime.fromisoformat(given).astimezone(UTC)
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is None or not run.auto_scheduled or run.expected_start_time is None:
        return None
    return run.expected_start_time.astimezone(UTC)


@flow(name="collect", flow_run_name="collect {settings.name} of {settings.run_id}", **DURABLE)
def collect(settings: CollectForm) -> Reference:
    """Collect rollouts of a checkpoint into a separate dataset, without training. With a schedule: every night, for
    example."""
    config = settings.accepted(_state())
    with _labelled(*_labels(config), f"dataset:{settings.name}"), services_of(config):
        return on_demand.collect.fn(
            config,
            settings.name,
            version=settings.version,
            moment=planned_moment(settings.moment),
            keep_last=settings.keep_last,
            checkpoint=settings.checkpoint,
            keep_days=settings.keep_days,
        )


@flow(name="evaluate", flow_run_name="evaluate {settings.run_id}", **DURABLE)
def evaluate(settings: EvaluateForm) -> Reference:
    """Evaluate a checkpoint of a run on its held-out tasks."""
    config = settings.accepted(_state())
    with _labelled(*_labels(config)), services_of(config):
        return on_demand.evaluate.fn(config, settings.version)


@flow(name="replay", flow_run_name="replay {settings.run_id} from {settings.first}", **DURABLE)
def replay(settings: ReplayForm) -> dict[str, Any]:
    """Run recorded stages again, with your changes, into replays/ of the store, and compare them with the original.

    Retry resumes after the last complete stage. The result is the comparison: the differences, starting with the first,
    and their cause.
    """
    with _labelled(f"run:{settings.run_id}"):
        return settings.replay(get_run_logger().info).as_json()


def _approve_name() -> str:
    settings = flow_run.parameters["settings"]
    verb = {"approve": "approve", "refuse": "refuse", "on_timeout": "time limit of"}.get(settings.decision, "approve?")
    return f"{verb} version {settings.version} of {settings.run_id}"


@flow(name="approve", flow_run_name=_approve_name, **DURABLE)
def approve(settings: ApproveForm) -> dict[str, Any]:
    """Approve or refuse the promotion of a version. Without a decision it asks: Resume opens the form."""
    run = load_run(settings.store, settings.run_id)
    refuse_unaccepted_code(run.config, [], "tracking", own_configurations(_state()))
    return approval.decide(run, settings)


DEPLOYED = (train, train_offline, collect, evaluate, fork, replay, approve)
DESK = ("approve",)
"""Deployments that a person waits for and that need no engine: they do not queue behind a run."""


async def deployments() -> list[RunnerDeployment]:
    """One deployment a flow, under the flow's name."""
    return [
        await deployed.ato_deployment(
            name=deployed.name,
            description=deployed.description,
            tags=["roundhouse"],
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        for deployed in DEPLOYED
    ]


def _refuse_unready_start(config: RunConfig) -> None:
    """Refuse a run that cannot begin before the store has a record of it.

    Raises:
        ConfigError, StoreError: as `refuse_unready`.
    """
    if not run_exists(config.store, config.run_id):
        refuse_unready(config)


def _train(config: RunConfig) -> dict[str, Any]:
    config = config.model_copy(update={"resume": ResumeConfig()})
    with _labelled(*_labels(config)), services_of(config):
        return training_flow(config).fn(config)


def _state() -> str | None:
    return os.environ.get(STATE_VARIABLE)


def _labels(config: RunConfig) -> list[str]:
    return [f"run:{config.run_id}", *(f"{name}:{value}" for name, value in config.tracking.labels.items())]


@contextmanager
def _labelled(*labels: str) -> Iterator[None]:
    """Tag this flow run and all that it starts, report its progress to Prefect, and allow suspension."""
    with get_client(sync_client=True) as client:
        present = client.read_flow_run(flow_run.id).tags
        client.update_flow_run(flow_run.id, tags=sorted({*present, *labels}))
    with tagging(*labels), lasting_suspensions(), reports_to_prefect():
        yield
