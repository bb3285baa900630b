"""What a stage that collects rollouts wants of whoever collects them: one process, or several.

Invariant: when `collect` returns, each rollout that was asked for is in the store with its turns, and `commit` makes exactly
these the stage's datasets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from roundhouse.collection.metrics import rollout_metrics
from roundhouse.config.models import Sampling
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.store.manifest import Reference
from roundhouse.trajectories.records import Rollout

Progress = Callable[[int, int], None]
"""Called with (finished, planned)."""


@dataclass(frozen=True)
class Collected:
    """All planned rollouts, in the plan's order."""

    rollouts: list[Rollout]
    """Collected elsewhere, they are here without words and token IDs (`trajectories.outlines`)."""
    window_seconds: float
    """Wall time in which rollouts ran: engine, environment and agent loop together."""

    def metrics(self) -> dict[str, float]:
        generated = sum(len(turn.generation_token_ids) for rollout in self.rollouts for turn in rollout.turns)
        rates = {"rollout/tokens_per_second": generated / self.window_seconds} if self.window_seconds > 0 else {}
        return rollout_metrics(self.rollouts) | {"time/rollouts": self.window_seconds} | rates


class RolloutCollector(Protocol):
    """Of one attempt at a stage."""

    def collect(
        self,
        specs: Sequence[RolloutSpec],
        sampling: Sampling,
        engine_url: str,
        progress: Progress | None = None,
        *,
        on_policy: bool = True,
    ) -> Collected:
        """Collect what is missing of `specs`; called again for another round. `on_policy` as for `gym.collector.collect`."""
        ...

    def metrics(self) -> dict[str, float]:
        """How it went: interrupted rollouts, shards."""
        ...

    def commit(
        self,
        *,
        inputs: dict[str, Reference],
        counts: dict[str, int],
        metrics: dict[str, float],
        details: dict[str, Any],
    ) -> Reference:
        """Make the stage complete with all that was collected."""
        ...
