"""The process that serves the deployments on this machine: `python -m roundhouse_flows.serve <state directory> --port
N`.

Invariant: while it runs, a requested flow run (the UI's Run, a schedule, Retry, Resume) starts within seconds in a
separate process, one at a time, because they share the machine's engine. Only deployments that answer a person (`DESK`)
do not wait. At its start, no flow run of its deployments is left in a state that needs a dead process.

It waits for the Prefect server of the same state directory, so both may be started at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx

from roundhouse.errors import InfraError
from roundhouse.http.ports import LOOPBACK, HttpThread
from roundhouse.infra.services import status

log = logging.getLogger(__name__)

SERVER_SECONDS = 230.0
POLL_SECONDS = 2.0
DESK_LIMIT = 4
SUSPENSIONS_SECONDS = 20.0
"""Between two looks at the suspended flow runs; well below the 300 s after which Prefect's page lets a suspension end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="state directory of the services")
    parser.add_argument("--port", type=int, required=True, help="of the health page")
    parser.add_argument("--limit", type=int, default=1, help="flow runs at a time")
    arguments = parser.parse_args()
    deadline = time.monotonic() + SERVER_SECONDS
    while not (services := status(arguments.state)).is_ready("prefect"):
        if time.monotonic() > deadline:
            raise InfraError(
                f"The Prefect server of {arguments.state} is not ready after {SERVER_SECONDS:.0f} s. Its log: logs/prefect.log."
            )
        time.sleep(0.2)
    # Prefect reads its settings when it is first imported, which must be after this.
    os.environ.update(services.environment())
    os.environ["ROUNDHOUSE_STATE"] = str(arguments.state.resolve().parent)
    asyncio.run(_serve(arguments.limit, arguments.port))


async def _serve(limit: int, port: int) -> None:
    from fastapi import FastAPI
    from prefect.runner import Runner
    from prefect.runner.server import perform_health_check
    from prefect.types._datetime import now

    from roundhouse_flows._prefect.orphans import settle_orphans
    from roundhouse_flows.alerts import install_once
    from roundhouse_flows.deployments import DESK, deployments

    options: dict[str, Any] = {"query_seconds": POLL_SECONDS, "pause_on_shutdown": False}
    runner = Runner(name="roundhouse", limit=limit, **options)
    desk = Runner(name="roundhouse-desk", limit=DESK_LIMIT, **options)
    all_deployments = await deployments()
    served = [await (desk if each.name in DESK else runner).aadd_deployment(each) for each in all_deployments]
    await settle_orphans(served)
    await asyncio.to_thread(install_once)
    runner.last_polled = now("UTC")  # its health page is asked before its first poll
    # Instead of Prefect's own page, on which anybody may shut the runner down.
    page = FastAPI(openapi_url=None)
    page.add_api_route("/health", perform_health_check(runner))
    HttpThread(page, LOOPBACK, port)
    keeping = asyncio.create_task(_keep_suspensions(served))
    await asyncio.gather(desk.start(), runner.start())  # in this order: the last one hears SIGTERM
    keeping.cancel()


async def _keep_suspensions(served: Sequence[UUID]) -> None:
    """Keep all suspended flow runs suspended: a flow run cannot do so itself after its process was killed."""
    from prefect.exceptions import PrefectHTTPStatusError

    from roundhouse_flows._prefect.suspension import prolong_suspensions

    while True:
        try:
            await prolong_suspensions(served)
        except (httpx.HTTPError, PrefectHTTPStatusError) as error:
            log.warning("Prefect does not list its suspended flow runs, and is asked again: %s", error)
        await asyncio.sleep(SUSPENSIONS_SECONDS)


if __name__ == "__main__":
    main()
