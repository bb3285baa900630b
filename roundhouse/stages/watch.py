"""What the alerts look at: the numbers of the newest iterations, read from the store once and remembered.

Invariant: a view. It reads committed manifests only, and nothing waits for it but the alerts.
"""

from __future__ import annotations

from collections import deque

from roundhouse.health.alerts import MISMATCH, REMEMBERED, WATCHED, Alert, Metrics, new_alerts
from roundhouse.store.run import Run
from roundhouse.store.stage import read_manifest


class AlertWatch:
    """The numbers of one run in this process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._history: deque[Metrics] = deque(maxlen=REMEMBERED + run.config.alerts.reward_window)
        self._newest: int | None = None

    def look(self, iteration: int) -> list[Alert]:
        """Alerts that begin with this iteration; each iteration is looked at once."""
        if self._newest is None:
            self._newest = max(self._run.first_version, iteration - (self._history.maxlen or 0))
            for k in range(self._newest + 1, iteration):
                self._history.append(watched_metrics(self._run, k))
        elif iteration <= self._newest:
            return []
        self._newest = iteration
        self._history.append(watched_metrics(self._run, iteration))
        return new_alerts(self._run.config.alerts, list(self._history))


def watched_metrics(run: Run, iteration: int) -> dict[str, float]:
    """The metrics of an iteration that alerts are made of; those of a skipped one are missing.

    Engine and trainer are held against each other only where both had the same weights: old rollouts differ by design.
    """
    config, found = run.config, dict[str, float]()
    judged = WATCHED if config.offline is None and config.asynchrony.staleness == 0 else set(WATCHED) - {MISMATCH}
    for kind in ("collect", "train"):
        if (reference := run.stage(iteration, kind).reference()) is not None:
            metrics = read_manifest(reference).metrics
            found |= {name: metrics[name] for name in judged if name in metrics}
    return found
