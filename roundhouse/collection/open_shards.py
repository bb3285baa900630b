"""What the generation loop knows of the shards of an open collection.

Invariant: a shard is whole (it has an outcome), at work, or waits for admission.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

from roundhouse.collection.in_process_runner import Progress, window_of
from roundhouse.collection.rollouts import Key
from roundhouse.collection.shard_workers import ShardTask, Workers
from roundhouse.collection.sharded_attempt import ShardedAttempt, ShardOutcome
from roundhouse.collection.shards import Shard


@dataclass(frozen=True)
class OpenShard:
    """A shard of an open collection."""

    shard: Shard
    task: ShardTask
    keys: tuple[Key, ...]
    """Of its rollouts, in the plan's order."""

    @property
    def label(self) -> str:
        return self.shard.label

    def holds(self, key: Key) -> bool:
        """Whether a rollout of its iteration is in it: they lie next to each other."""
        return self.keys[0] <= key <= self.keys[-1]


@dataclass
class OpenShards:
    """An iteration whose shards may begin."""

    iteration: int
    attempt: ShardedAttempt
    shards: list[OpenShard]
    outcomes: dict[str, ShardOutcome]
    """By shard; complete when all have one."""
    workers: Workers | None
    """None: all shards were whole when it was opened."""
    ending: ExitStack
    """Lets go of the workers."""
    context: contextvars.Context
    """Of its stage, so that its workers are signs of life of this stage."""
    progress: Progress | None
    stopped: threading.Event = field(default_factory=threading.Event)
    """Its workers are to end."""
    error: Exception | None = None
    """Why it cannot be completed by this attempt."""
    losses: Counter[str] = field(default_factory=Counter)
    finished: dict[str, int] = field(default_factory=dict)
    """Rollouts that a worker at work has told to be finished, by shard."""
    told: int = 0
    cpu_seconds: float = 0.0
    """Of the threads that waited for its workers."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By shard, the first begin and the last end of its workers in this attempt, of one clock."""

    @property
    def complete(self) -> bool:
        return len(self.outcomes) == len(self.shards)

    @property
    def planned(self) -> int:
        return sum(len(open_shard.keys) for open_shard in self.shards)

    @property
    def window_seconds(self) -> float:
        """From its first worker's begin to its last one's end, in this attempt."""
        return window_of(self.spans.values())

    def of(self, key: Key) -> OpenShard:
        """The shard that a rollout is in."""
        return next(open_shard for open_shard in self.shards if open_shard.holds(key))

    def tell(self) -> None:
        """Tell how far it is, where that is news."""
        at_work = sum(count for label, count in list(self.finished.items()) if label not in self.outcomes)
        finished = at_work + sum(len(outcome.rollouts) for outcome in list(self.outcomes.values()))
        if self.progress is not None and finished != self.told:
            self.told = finished
            self.progress(finished, self.planned)
