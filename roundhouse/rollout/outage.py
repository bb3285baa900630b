"""When to stop asking an engine or environment that is gone: pure state machines over the rollouts of one collection.

Invariant: an `Outage` opens only when `threshold` rollouts in a row, each after all its attempts, failed for infrastructure.
Any other outcome in between shows that something still works and starts the count anew. Once open, it stays open.

Without it a collection of 10,000 rollouts would try each of them three times against a dead engine. A `RetryBudget` bounds the
retries where not everything fails: where one rollout in three does, three attempts each would hide it and cost a half more.
"""

from __future__ import annotations

import math

from roundhouse.trajectories.records import FailureKind, Rollout, Status

SMALLEST_THRESHOLD = 4
"""A few rollouts fail alone for reasons of their own, even when they run one at a time."""


class Outage:
    """Watches the finished rollouts of one collection with `workers` in flight."""

    def __init__(self, workers: int) -> None:
        # One whole wave: with all in flight at once, a shorter row may be a single hiccup that hit them together.
        self.threshold = max(workers, SMALLEST_THRESHOLD)
        self._in_a_row = 0
        self.last: Rollout | None = None
        """The failure that opened it."""

    @property
    def open(self) -> bool:
        return self.last is not None

    def record(self, rollout: Rollout) -> None:
        """Take note of a finished rollout."""
        infra = rollout.status is Status.FAILED and rollout.failure_kind is FailureKind.INFRA
        self._in_a_row = self._in_a_row + 1 if infra else 0
        if self._in_a_row >= self.threshold and self.last is None:
            self.last = rollout


class RetryBudget:
    """The retries of one collection: at most `fraction` of its rollouts, and none later than `seconds` after the first."""

    def __init__(self, rollouts: int, fraction: float | None, seconds: float | None) -> None:
        self._left = math.inf if fraction is None else math.ceil(rollouts * fraction)
        self._seconds = seconds
        self._first_at: float | None = None

    def take(self, now: float) -> bool:
        """Whether there may be one more retry at this time, in seconds of any clock that does not run backwards."""
        first_at = now if self._first_at is None else self._first_at
        if self._left < 1 or (self._seconds is not None and now - first_at > self._seconds):
            return False
        self._first_at, self._left = first_at, self._left - 1
        return True
