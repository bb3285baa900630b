"""How long which state of a Job is borne: pure but for the time that it is given.

Invariant: every wait ends: for a queue, for nodes, for a container to start, for the Job itself, each by a key of the
configuration that the error names. Time in the queue counts for nothing else.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from roundhouse.errors import InfraError
from roundhouse.infra.kubernetes.job_status import Waiting
from roundhouse.infra.kubernetes.names import StageIdentity
from roundhouse.infra.kubernetes.stage_pod import PodSettings

NO_POD_SECONDS = 20.0
"""Without a pod for this long, the Job's events are asked for the reason."""
SLACK_SECONDS = 120.0
"""Beyond the Job's own deadline; after it, the cluster's Job controller is taken for dead."""


class Awaited(Protocol):
    """What is waited for (`job.JobPlan`)."""

    @property
    def identity(self) -> StageIdentity: ...
    @property
    def infra(self) -> Any: ...
    @property
    def settings(self) -> PodSettings: ...
    def seconds(self) -> int: ...


class JobDeadlines:
    """How long which state of a Job is borne."""

    def __init__(self, plan: Awaited) -> None:
        self._plan = plan
        self._began = time.monotonic()
        self._queued = 0.0
        self._problem_since: float | None = None
        self._asked = False
        self.event = ""
        """What the cluster said about the missing pods."""

    def left(self, waiting: Waiting, has_pods: bool, now: float) -> float:
        """Seconds until the present state must have changed.

        Raises:
            InfraError, ConfigError: it has not.
        """
        infra, settings = self._plan.infra, self._plan.settings
        name = self._plan.identity.stage
        if waiting.queued:
            self._queued = now - self._began
            return self._or_raise(
                infra.queue_seconds - self._queued,
                InfraError(f"The {name} Job was not admitted by queue {infra.queue} in infra.queue_seconds."),
            )
        total = self._began + self._queued + self._plan.seconds() + SLACK_SECONDS - now
        self._or_raise(
            total,
            InfraError(f"The {name} Job is long past its deadline and still not ended. Does the Job controller run?"),
        )
        if waiting.problem is None:
            self._problem_since = None
            return total
        since = self._problem_since = self._problem_since if self._problem_since is not None else now
        if not waiting.pending:
            return min(total, self._or_raise(since + settings.image_seconds - now, waiting.problem))
        problem = waiting.problem
        if not has_pods and self.event:
            problem = InfraError(f"{problem} The cluster says: {self.event}")
        return min(total, self._or_raise(since + settings.pending_seconds - now, problem))

    def is_time_for_events(self, now: float) -> bool:
        """Once, when no pod came for a while."""
        if self._asked or now - self._began - self._queued < NO_POD_SECONDS:
            return False
        self._asked = True
        return True

    def next_look(self, seconds: float) -> float:
        """When to look again at the latest, given what `left` said."""
        return min(seconds, NO_POD_SECONDS)

    @staticmethod
    def _or_raise(seconds: float, error: Exception) -> float:
        if seconds <= 0:
            raise error
        return seconds
