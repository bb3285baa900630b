"""Which Prefect server a command talks to.

Invariant: called before Prefect is imported, since its client reads its settings then.
"""

from __future__ import annotations

import os
from pathlib import Path


def find_prefect(state: Path) -> bool:
    """Let Prefect's client find the server of this state directory, else the one that PREFECT_API_URL names; whether there is
    one."""
    from roundhouse.infra import services

    running = services.status(state / "services")
    if running.is_ready("prefect"):
        os.environ.update(running.environment())
        return True
    return "PREFECT_API_URL" in os.environ


def at_prefect(state: Path) -> None:
    """The same, where there must be one.

    Raises:
        InfraError: neither; it says how to start one.
    """
    from roundhouse.errors import InfraError

    if not find_prefect(state):
        raise InfraError(
            f"No Prefect server runs in {state / 'services'}, and PREFECT_API_URL is not set. Start it with `roundhouse up`."
        )
