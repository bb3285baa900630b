"""How a process of a run begins to be observed: its logs (`ROUNDHOUSE_LOG`), its metrics (`ROUNDHOUSE_METRICS_PORT`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from roundhouse.logs import set_up_logs

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

METRICS_VARIABLE = "ROUNDHOUSE_METRICS_PORT"


def set_up_observability() -> CollectorRegistry | None:
    """Do what the environment says; what it says nothing of costs nothing. Returns where metrics are told, if anywhere.

    Raises:
        ConfigError: a variable has a value that cannot be.
    """
    set_up_logs()
    # of several ranks in a pod, the first has the page
    if not os.environ.get(METRICS_VARIABLE) or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    from roundhouse.health.metrics_page import open_metrics_page

    return open_metrics_page(os.environ[METRICS_VARIABLE]).registry
