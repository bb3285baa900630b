"""The process of a flow run's pod: `python -m roundhouse_flows.flow_run_job`.

Prefect's `flow-run execute`, with an exit code for the Job.

Prefect's command exits with 0 whatever state the flow run ended in: the Job of a failed flow run is `Complete`, and alerts on
failed Jobs never fire. This one exits with 1 if the flow run FAILED or CRASHED, and with 0 if it completed, was cancelled, is
suspended, or was scheduled again (SIGTERM): Prefect's worker reports a failed Job of an unfinished flow run as a crash.
"""

from __future__ import annotations

import asyncio
import os
import sys
from uuid import UUID


async def execute() -> int:
    """Run the flow run of PREFECT__FLOW_RUN_ID to its end; the exit code."""
    from prefect.cli.flow_run import execute as execute_flow_run
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType

    flow_run_id = UUID(os.environ["PREFECT__FLOW_RUN_ID"])
    await execute_flow_run(flow_run_id)
    async with get_client() as client:
        state = (await client.read_flow_run(flow_run_id)).state
    return int(state is not None and state.type in (StateType.FAILED, StateType.CRASHED))


if __name__ == "__main__":
    sys.exit(asyncio.run(execute()))
