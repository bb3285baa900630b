"""Plans the flow runs of schedules, a minute ahead.

Prefect's server has a scheduler of its own. In version 3.7 with SQLAlchemy 2.1 each of its rounds fails ("Can't evaluate bulk
DML statement"), so that no schedule ever fires; here the same is done through its API.

Invariant: a moment of a schedule is planned once. The key is the one that Prefect's scheduler uses, so both may be at work, and
a planner that was restarted plans nothing twice. Moments in the past are never planned: they are for a back-fill.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import PrefectHTTPStatusError
from prefect.server.schemas.schedules import CronSchedule as CronDates
from prefect.states import Scheduled

AHEAD = timedelta(seconds=60)
ROUND_SECONDS = 15.0

log = logging.getLogger(__name__)


async def keep_planning(deployments: Sequence[UUID]) -> None:
    """Plan round after round, until cancelled. A server that does not answer is asked again in the next round."""
    while True:
        try:
            async with get_client() as client:
                for deployment in deployments:
                    await plan(client, deployment, datetime.now(UTC))
        except (httpx.HTTPError, PrefectHTTPStatusError) as error:
            log.warning("schedules cannot be read: %s", error)
        await asyncio.sleep(ROUND_SECONDS)


async def plan(client: PrefectClient, deployment: UUID, now: datetime) -> list[datetime]:
    """Plan what is due within `AHEAD`; the moments."""
    planned = []
    for schedule in await client.read_deployment_schedules(deployment):
        if schedule.active and isinstance(schedule.schedule, CronSchedule):
            for moment in await _moments(schedule.schedule, now):
                await _plan_one(client, deployment, schedule, moment)
                planned.append(moment)
    return planned


async def _moments(cron: CronSchedule, now: datetime) -> list[datetime]:
    dates = CronDates(cron=cron.cron, timezone=cron.timezone, day_or=cron.day_or)
    return [moment for moment in await dates.get_dates(n=4, start=now, end=now + AHEAD) if moment >= now]


async def _plan_one(client: PrefectClient, deployment: UUID, schedule: DeploymentSchedule, moment: datetime) -> None:
    await client.create_flow_run_from_deployment(
        deployment,
        parameters=schedule.parameters or {},
        state=Scheduled(scheduled_time=moment),
        idempotency_key=f"scheduled {deployment} {schedule.id} {moment}",
        tags=["auto-scheduled", f"schedule:{schedule.slug}"],
    )
