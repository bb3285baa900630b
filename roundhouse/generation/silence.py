"""Replicas that have started and do not answer.

Invariant: a replica is silent for the time since it last answered, or since it was first seen to have started. Serve itself
replaces no replica that holds still while it takes a new `user_config`: it waits for the answer without a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STARTED = {"RUNNING", "UPDATING"}
"""Serve's states of a replica with a started engine."""
SILENT_SECONDS = 60.0
"""A replica may be busy for so long, as Serve's health check allows (`serve_app`)."""
REPORT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SilentReplica:
    """A replica that does not answer."""

    replica_id: str
    place: str
    """Process and node."""
    seconds: float

    def __str__(self) -> str:
        return f"replica {self.replica_id} ({self.place}) has not answered for {self.seconds:.0f} s"


def started_replicas(application: Mapping[str, Any]) -> dict[str, str]:
    """Return process and node of the started replicas by id, from an application as Serve's REST interface reports it."""
    return {
        replica["replica_id"]: f"process {replica.get('pid')} on {replica.get('node_ip')}"
        for deployment in application["deployments"].values()
        for replica in deployment.get("replicas", ())
        if replica["state"] in STARTED
    }


def actor_names(application: Mapping[str, Any], silent: Iterable[SilentReplica]) -> list[str]:
    """Return the names of the actors of silent replicas; `application` as of `started_replicas`."""
    ids = {one.replica_id for one in silent}
    return [
        replica["actor_name"]
        for deployment in application["deployments"].values()
        for replica in deployment.get("replicas", ())
        if replica["replica_id"] in ids and replica.get("actor_name")
    ]


class SilenceWatch:
    """Seconds of each replica's silence, from one caller's checks. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._reported = 0.0

    def hear(self, replica_ids: Iterable[str]) -> None:
        """Record that these replicas have just answered."""
        self._answered |= dict.fromkeys(replica_ids, self._clock())

    def silent(self, started: Mapping[str, str]) -> list[SilentReplica]:
        """Return the silent replicas, the longest silence first.

        Args:
            started: places by id, as `started_replicas` returns them.
        """
        now = self._clock()
        self._answered = {name: self._answered.get(name, now) for name in started}
        silences = [SilentReplica(name, place, now - self._answered[name]) for name, place in started.items()]
        return sorted((one for one in silences if one.seconds > 0), key=lambda one: -one.seconds)

    def is_report_due(self, silent: list[SilentReplica]) -> bool:
        """Return whether the silence is worth a line of progress, at most one in `REPORT_SECONDS`."""
        if not silent or silent[0].seconds < REPORT_SECONDS or self._clock() - self._reported < REPORT_SECONDS:
            return False
        self._reported = self._clock()
        return True
