"""How new weights come to a replica, beyond where they are stored.

Invariant: options change how the wanted version arrives, never which it is: a replica that cannot follow them (it has just
started, it holds another base) comes to the same version by the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from roundhouse.config.generation import InflightRequests


@dataclass(frozen=True, slots=True)
class RefitOptions:
    """Fields of `DesiredPolicy`; what is left at its default is left out of the desired state."""

    digest: str | None = None
    """`roundhouse.generation.weights.digest_of` of what the engine is to load; replicas refuse anything else."""
    way: dict[str, Any] | None = None
    """`roundhouse.weight_sync.base.Way` as JSON."""
    running: InflightRequests = "drain"
    keep_prefix_cache: bool = False
    sampling: list[dict[str, Any]] | None = None
    """See `DesiredPolicy.sampling`."""
    asleep: str | None = None
    """The engine is to sleep at this version, and the text says what for."""

    def desired_state(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}
