"""A replica that generates nothing and takes as long as one that does.

Invariant: all rollouts in its slots advance alike, one unit of work in `step + step_per_rollout * running` seconds, and not at
all while it is paused. So one clock of attained work serves them all, and the rollout with the least left ends next.

    step 0.01, per rollout 0.001: with 10 rollouts a token takes 0.02 s, with 100 of them 0.11 s
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from roundhouse.collection.rollouts import Key
from roundhouse.config.simulation import EngineScenario


@dataclass(slots=True)
class Slot:
    """A running rollout."""

    attempt: int
    versions: list[int]
    """Policy versions that generated, oldest first: what the engine would report with the tokens."""
    began: float
    """Seconds since the run began."""


@dataclass(slots=True)
class SimulatedReplica:
    """See the module's docstring."""

    name: str
    scenario: EngineScenario
    version: int | None = None
    paused: bool = False
    life: int = 0
    """Changes whenever what was foreseen about it is void."""
    slots: dict[Key, Slot] = field(default_factory=dict)
    busy_seconds: float = 0.0
    """Slot-seconds in which a rollout ran."""
    paused_seconds: float = 0.0
    """Slot-seconds in which a rollout was held by a transfer."""
    _clock: float = 0.0
    """When `_work` was brought up to date."""
    _work: float = 0.0
    """Units that a rollout has got which is here since the beginning."""
    _ends: list[tuple[float, Key, int]] = field(default_factory=list)
    """(work at its end, rollout, attempt), a heap."""

    @property
    def free(self) -> int:
        return self.scenario.slots - len(self.slots)

    def begin(self, now: float, key: Key, attempt: int, work: float) -> None:
        self._advance(now)
        version = [self.version] if self.version is not None and not self.paused else []
        self.slots[key] = Slot(attempt, version, now)
        heapq.heappush(self._ends, (self._work + self.scenario.prefill_work + work, key, attempt))

    def next_end(self, now: float) -> float | None:
        """When the next rollout ends if nothing changes."""
        if self.paused or not self._ends:
            return None
        self._advance(now)
        return now + max(0.0, self._ends[0][0] - self._work) * self._step()

    def end(self, now: float) -> tuple[Key, Slot]:
        """The rollout that ends now."""
        self._advance(now)
        _, key, _ = heapq.heappop(self._ends)
        return key, self.slots.pop(key)

    def pause(self, now: float) -> None:
        self._advance(now)
        self.paused = True

    def resume(self, now: float, version: int) -> None:
        """Go on with other weights."""
        self._advance(now)
        self.paused, self.version = False, version
        for slot in self.slots.values():
            slot.versions.append(version)

    def clear(self, now: float) -> float:
        """Lose weights and rollouts; return the slot-seconds that these had taken."""
        self._advance(now)
        lost = sum(now - slot.began for slot in self.slots.values())
        self.slots.clear()
        self._ends.clear()
        self.paused, self.version, self.life = False, None, self.life + 1
        return lost

    def _step(self) -> float:
        return self.scenario.step_seconds + self.scenario.step_seconds_per_rollout * len(self.slots)

    def _advance(self, now: float) -> None:
        passed, running = now - self._clock, len(self.slots)
        if passed > 0 and running:
            if self.paused:
                self.paused_seconds += passed * running
            else:
                self.busy_seconds += passed * running
                self._work += passed / self._step()
        self._clock = now
