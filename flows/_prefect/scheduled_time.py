"""The moment that a scheduled flow run is for: the planned one, however late it starts and however often it is retried."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

_PLANNED = re.compile(r"scheduled \S+ \S+ (?P<moment>\d{4}-\d\d-\d\d[ T]\S+)")


def scheduled_time(given: str | None) -> datetime | None:
    """The moment that was given, else the one that a schedule planned this flow run for; None when nobody planned it.

    Prefect moves a flow run's start times when it is retried. What does not move is the key by which its scheduler plans each
    moment once.
    """
    if given is not None:
        return datetime.fromisoformat(given).astimezone(UTC)
    if flow_run.id is None:
        return None
    with get_client(sync_client=True) as client:
        key = client.read_flow_run(flow_run.id).idempotency_key
    planned = _PLANNED.fullmatch(key or "")
    return None if planned is None else datetime.fromisoformat(planned["moment"]).astimezone(UTC)
