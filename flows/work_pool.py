"""The flows as deployments of a Prefect work pool, by `prefect.yaml`.

Invariant: after `deploy` the server has the pool with the given template, and each deployment equals the file's; a
second call changes nothing. Everything outside the file stays: other deployments, schedules that people added.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound, ParameterTypeError, PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema

from roundhouse.config.deployments import DeploymentEntry, DeploymentsFile, JobTemplate, ScheduleEntry
from roundhouse.errors import ConfigError, InfraError

POOL_TYPE = "kubernetes"
FROM_FILE = "prefect.yaml: "
"""Prefix of a slug of the file's schedules, so that removed ones are recognised."""
SERVED = "a process of this server's machine serves it, as `roundhouse up` does"


def deploy(file: DeploymentsFile, template: JobTemplate, *, dry_run: bool = False) -> Iterator[str]:
    """Make it so; a line for each thing that was made or changed, or that a dry run would.

    Raises:
        ConfigError: a pool is of another type, a process serves a deployment of that name, a schedule lacks a parameter, the
            server refuses a value.
        InfraError: the server does not answer as it should.
    """
    for entry in file.deployments:
        for schedule in entry.schedules:
            _cron(schedule)
            try:  # now, not at two in the morning
                entry.flow().validate_parameters(entry.parameters | schedule.parameters)
            except ParameterTypeError as error:
                raise ConfigError(f"deployments.{entry.name}, schedule {schedule.slug}: {error}") from error
    try:
        with get_client(sync_client=True) as client:
            if not dry_run:
                for entry in file.deployments:
                    _refuse_served(client, entry)
            for name in file.pool_names():
                yield from _pool(client, name, template, dry_run)
            for entry in file.deployments:
                yield from _deployment(client, entry, dry_run)
    except PrefectHTTPStatusError as error:
        text = error.response.text[:1000]
        kind = ConfigError if error.response.status_code in (409, 422) else InfraError
        raise kind(f"The Prefect server refuses ({error.response.status_code}): {text}") from error


def _pool(client: SyncPrefectClient, name: str, template: JobTemplate, dry_run: bool) -> Iterator[str]:
    template_dict = template.model_dump()
    try:
        present = client.read_work_pool(name)
    except ObjectNotFound:
        if not dry_run:
            client.create_work_pool(WorkPoolCreate(name=name, type=POOL_TYPE, base_job_template=template_dict))
        yield f"work pool {name}: created"
        return
    if present.type != POOL_TYPE:
        raise ConfigError(
            f"Work pool {name!r} is of type {present.type!r}, not {POOL_TYPE!r}. Name another in work_pool.name, or delete it."
        )
    if present.base_job_template == template_dict:
        yield f"work pool {name}: as it should be"
        return
    if not dry_run:
        client.update_work_pool(name, WorkPoolUpdate(base_job_template=template_dict))
    yield f"work pool {name}: job template replaced"


def _deployment(client: SyncPrefectClient, entry: DeploymentEntry, dry_run: bool) -> Iterator[str]:
    flow = entry.flow()
    fields: dict[str, Any] = {
        "entrypoint": entry.entrypoint,
        "path": None,
        "pull_steps": [],
        "description": entry.description or flow.description,
        "parameters": entry.parameters,
        "tags": list(entry.tags),
        "work_pool_name": entry.work_pool.name,
        "work_queue_name": entry.work_pool.work_queue_name or "default",
        "job_variables": entry.work_pool.job_variables,
        "concurrency_limit": entry.concurrency_limit,
        "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
        "enforce_parameter_schema": True,
    }
    try:
        present = client.read_deployment_by_name(f"{flow.name}/{entry.name}")
    except ObjectNotFound:
        yield f"deployment {flow.name}/{entry.name}: created"
        yield from (f"  schedule {each.slug}: {each.cron} ({each.timezone})" for each in entry.schedules)
        if not dry_run:
            deployment_id = client.create_deployment(client.create_flow(flow), entry.name, **fields)
            _create_schedules(client, deployment_id, entry.schedules)
        return
    if _is_served(present):
        yield f"deployment {flow.name}/{entry.name}: refused, since {SERVED}"
        return
    limit = present.global_concurrency_limit  # there.concurrency_limit is always None
    here = {name: getattr(present, name) for name in fields} | {"concurrency_limit": limit and limit.limit}
    changed = sorted(name for name, value in fields.items() if here[name] != value)
    if changed and not dry_run:
        client.update_deployment(present.id, DeploymentUpdate(**fields))
    yield f"deployment {flow.name}/{entry.name}: {'changed: ' + ', '.join(changed) if changed else 'as it should be'}"
    yield from _schedules(client, present.id, present.schedules, entry, dry_run)


def _is_served(there: DeploymentResponse) -> bool:
    """Return whether its flow runs belong to a serving process rather than to a work pool."""
    return there.work_pool_name is None


def _refuse_served(client: SyncPrefectClient, entry: DeploymentEntry) -> None:
    name = f"{entry.flow().name}/{entry.name}"
    with suppress(ObjectNotFound):
        if _is_served(client.read_deployment_by_name(name)):
            raise ConfigError(
                f"Deployment {name} of {client.api_url} cannot be put on a work pool: {SERVED}. Name the cluster's server in "
                "PREFECT_API_URL, or the deployment otherwise in prefect.yaml."
            )


def _schedules(
    client: SyncPrefectClient, deployment: Any, there: list[DeploymentSchedule], entry: DeploymentEntry, dry_run: bool
) -> Iterator[str]:
    ours = {str(each.slug): each for each in there if str(each.slug).startswith(FROM_FILE)}
    from_file = {FROM_FILE + each.slug: each for each in entry.schedules}
    for slug in sorted({*ours, *from_file}):
        old, new = ours.get(slug), from_file.get(slug)
        if old is not None and new is not None:
            here = (old.schedule, old.active, old.parameters or {})
            if here == (_cron(new), new.active, new.parameters):
                continue
        if not dry_run:
            if old is not None:
                client.delete_deployment_schedule(deployment, old.id)
            if new is not None:
                _create_schedules(client, deployment, (new,))
        change = "removed" if new is None else f"{'changed' if old else 'created'}: {new.cron} ({new.timezone})"
        yield f"  schedule {slug.removeprefix(FROM_FILE)}: {change}"


def _create_schedules(client: SyncPrefectClient, deployment: Any, schedules: tuple[ScheduleEntry, ...]) -> None:
    if schedules:
        requests = [
            DeploymentScheduleCreate(
                schedule=_cron(each), active=each.active, parameters=each.parameters, slug=FROM_FILE + each.slug
            )
            for each in schedules
        ]
        client.create_deployment_schedules(deployment, requests)


def _cron(schedule: ScheduleEntry) -> CronSchedule:
    try:
        return CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    except ValueError as error:
        raise ConfigError(
            f"schedule {schedule.slug}: cron {schedule.cron!r}, timezone {schedule.timezone!r}: no schedule. Five fields are "
            "wanted, such as '0 2 * * *', and a time zone such as Europe/Berlin."
        ) from error
