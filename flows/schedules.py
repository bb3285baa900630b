"""Schedules of the collect deployment: a dataset that grows every night.

Invariant: a schedule is named by its dataset, and a moment of it is collected once: a planned flow run, a back-fill and a
retry of either make the same version of the dataset, or find it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.server.schemas.schedules import CronSchedule as CronDates
from prefect.utilities.asyncutils import run_coro_as_sync

from roundhouse.errors import ConfigError, InfraError
from roundhouse.stages.datasets import collected_moments, stamp
from roundhouse_flows.forms import CollectForm

DEPLOYMENT = "collect/collect"
MOST_BACK_FILLS = 100
"""A back-fill of more moments than this is taken for a mistake."""


@dataclass(frozen=True)
class Scheduled:
    """A schedule of the collect deployment."""

    form: CollectForm
    cron: str
    timezone: str
    active: bool
    id: UUID
    next_moment: datetime | None

    @property
    def name(self) -> str:
        """The dataset's."""
        return self.form.name


def add_schedule(form: CollectForm, cron: str, timezone: str = "UTC") -> Scheduled:
    """Collect by this cron expression; a schedule of the same dataset is replaced.

    Raises:
        ConfigError: no cron expression, no such time zone.
        InfraError: nothing serves the deployment.
    """
    try:
        schedule = CronSchedule(cron=cron, timezone=timezone)
    except ValueError as error:
        lines = str(error).splitlines()
        problem = lines[2].strip() if len(lines) > 2 else error  # pydantic's third item is the cause
        raise ConfigError(
            f"--cron {cron!r} --timezone {timezone!r}: {problem} Five fields are wanted, such as '0 2 * * *' for "
            "two o'clock every night, and a time zone such as Europe/Berlin."
        ) from error
    with get_client(sync_client=True) as client:
        deployment = _deployment(client)
        for other in _read(client):
            if other.name == form.name:
                client.delete_deployment_schedule(deployment.id, other.id)
                _forget_planned(client, form.name)
        body = {
            "schedule": schedule.model_dump(mode="json"),
            "active": True,
            "slug": form.name,
            "parameters": {"settings": form.model_dump(mode="json", exclude_none=True)},
        }
        client._client.post(f"/deployments/{deployment.id}/schedules", json=[body]).raise_for_status()
    return next(new_schedule for new_schedule in schedules() if new_schedule.name == form.name)


def schedules() -> list[Scheduled]:
    """All schedules of the collect deployment, by the dataset's name."""
    with get_client(sync_client=True) as client:
        return sorted(_read(client), key=lambda found: found.name)


def remove_schedule(name: str) -> None:
    """Stop collecting into a dataset; its versions stay.

    Raises:
        ConfigError: the schedule does not exist; the text lists the existing ones.
    """
    schedule = _named(name)
    with get_client(sync_client=True) as client:
        client.delete_deployment_schedule(_deployment(client).id, schedule.id)
        _forget_planned(client, name)


def missed(name: str, since: datetime, until: datetime | None = None) -> list[datetime]:
    """Return moments of a schedule in [since, until) without a complete version of the dataset.

    Raises:
        ConfigError: the schedule does not exist, or has more moments than a back-fill allows.
    """
    schedule = _named(name)
    dates = CronDates(cron=schedule.cron, timezone=schedule.timezone)
    end = until or datetime.now(UTC)
    moments: list[datetime] = run_coro_as_sync(dates.get_dates(n=MOST_BACK_FILLS + 1, start=since, end=end)) or []
    collected = collected_moments(schedule.form.store, name)
    missing = [moment for moment in moments if moment < end and stamp(moment) not in collected]
    if len(moments) > MOST_BACK_FILLS:
        raise ConfigError(
            f"--since {since:%Y-%m-%d}: more than {MOST_BACK_FILLS} moments since then. Give a later day."
        )
    return missing


def back_fill(name: str, moments: list[datetime]) -> list[str]:
    """Ask for the collection of these moments, one flow run each; their ids."""
    schedule = _named(name)
    with get_client(sync_client=True) as client:
        deployment = _deployment(client)
        started = []
        for moment in moments:
            form = schedule.form.model_copy(update={"moment": f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"})
            parameters = {"settings": form.model_dump(mode="json", exclude_none=True)}
            run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters, tags=["back-fill"])
            started.append(str(run.id))
    return started


def _read(client: SyncPrefectClient) -> list[Scheduled]:
    deployment = _deployment(client)
    result = []
    for schedule in client.read_deployment_schedules(deployment.id):
        settings = (schedule.parameters or {}).get("settings")
        if not isinstance(schedule.schedule, CronSchedule) or settings is None:
            continue  # made by hand in the Prefect page, without a form: unknown to us
        timezone = schedule.schedule.timezone or "UTC"
        dates = CronDates(cron=schedule.schedule.cron, timezone=timezone)
        coming = run_coro_as_sync(dates.get_dates(n=1, start=datetime.now(UTC))) if schedule.active else None
        form = CollectForm.model_validate(settings)
        result.append(
            Scheduled(
                form, schedule.schedule.cron, timezone, schedule.active, schedule.id, coming[0] if coming else None
            )
        )
    return result


def _forget_planned(client: SyncPrefectClient, name: str) -> None:
    """Delete the flow runs that were planned and have not begun."""
    waiting = {"tags": {"all_": [f"schedule:{name}"]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    for run in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(waiting)):
        client.delete_flow_run(run.id)


def _named(name: str) -> Scheduled:
    existing = schedules()
    for schedule in existing:
        if schedule.name == name:
            return schedule
    raise ConfigError(
        f"No schedule collects into {name!r}. Available: {', '.join(each.name for each in existing) or 'none'}."
    )


def _deployment(client: SyncPrefectClient) -> Any:
    try:
        return client.read_deployment_by_name(DEPLOYMENT)
    except ObjectNotFound as error:
        raise InfraError("The Prefect server lacks the deployment 'collect'. Start it with `roundhouse up`.") from error
    except PrefectHTTPStatusError as error:
        raise InfraError(f"The Prefect server refuses: {error}") from error
