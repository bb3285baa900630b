"""The trajectory pool: between collectors that finish at any time and a trainer that takes whole batches.

Invariants: a trajectory is put at most once and handed out at most once; what is handed out is no older than the bound;
whatever the pool does not keep is said with a word and a reason, so that its rollout is repeated and none is lost. Its contents
are a function of what lies in the store: `roundhouse.collection.parts` makes them again after a crash.

    put ──> success | fail | re-rollout (reason)      take(groups) ──> PoolBatch      evict(…) ──> what to roll out again

One pool holds a part per model tag; parts share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from roundhouse.collection.parts import written_rollouts
from roundhouse.errors import DataError
from roundhouse.store.location import Location
from roundhouse.trajectories.records import Rollout, Status

KEYS: dict[str, Callable[[Trajectory], str]] = {
    "group_id": lambda trajectory: f"{trajectory.iteration}/{trajectory.rollout.group_id}",
    "environment": lambda trajectory: trajectory.rollout.environment,
    "iteration": lambda trajectory: str(trajectory.iteration),
}
"""What trajectories can be grouped by."""


@dataclass(frozen=True)
class Trajectory:
    """A rollout on its way to training."""

    rollout: Rollout
    iteration: int
    """Whose own rollout it is."""
    model_tag: str = "default"

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Policy version of each turn."""
        return tuple(turn.policy_version for turn in self.rollout.turns)

    @cached_property
    def name(self) -> tuple[int, str]:
        """What tells it from all others of its model: task ids come again in later iterations."""
        return (self.iteration, self.rollout.rollout_id)


class Store(Protocol):
    """Keeps trajectories until they are finished."""

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        """Keep it; return what is finished by it."""
        ...

    def waiting(self) -> Iterator[Trajectory]:
        """What is not finished."""
        ...

    def discard(self, trajectory: Trajectory) -> None:
        """Take out one that waits."""
        ...


class SimpleStore:
    """Nothing waits for anything."""

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        return [trajectory]

    def waiting(self) -> Iterator[Trajectory]:
        return iter(())

    def discard(self, trajectory: Trajectory) -> None:
        raise DataError(f"{trajectory.name} does not wait in this store.")


@dataclass
class GroupedStore:
    """Waits for groups, told by one key."""

    key: str
    group_size: int
    groups: dict[str, list[Trajectory]] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        name = KEYS[self.key](trajectory)
        members = self.groups.setdefault(name, [])
        members.append(trajectory)
        return self.groups.pop(name) if len(members) == self.group_size else []

    def waiting(self) -> Iterator[Trajectory]:
        for members in self.groups.values():
            yield from members

    def discard(self, trajectory: Trajectory) -> None:
        name = KEYS[self.key](trajectory)
        self.groups[name].remove(trajectory)
        if not self.groups[name]:
            del self.groups[name]


@dataclass
class HierarchicalStore:
    """Waits for the leaf groups of a tree, told by several keys, the outermost first."""

    keys: Sequence[str]
    group_size: int
    branches: dict[str, Store] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        return self._branch(trajectory).add(trajectory)

    def waiting(self) -> Iterator[Trajectory]:
        for branch in self.branches.values():
            yield from branch.waiting()

    def discard(self, trajectory: Trajectory) -> None:
        self._branch(trajectory).discard(trajectory)

    def _branch(self, trajectory: Trajectory) -> Store:
        name = KEYS[self.keys[0]](trajectory)
        if name not in self.branches:
            self.branches[name] = build_store(self.keys[1:], self.group_size)
        return self.branches[name]


def build_store(keys: Sequence[str], group_size: int) -> Store:
    """Simple without a key, grouped with one, hierarchical with more.

    Raises:
        DataError: there is no such key, or the group size is below 1.
    """
    if unknown := [key for key in keys if key not in KEYS]:
        raise DataError(f"Trajectories cannot be grouped by {unknown[0]!r}. Keys: {', '.join(KEYS)}.")
    if group_size < 1:
        raise DataError(f"group_size is {group_size}: a group has at least one trajectory.")
    if not keys:
        return SimpleStore()
    return GroupedStore(keys[0], group_size) if len(keys) == 1 else HierarchicalStore(tuple(keys), group_size)


class Put(StrEnum):
    """What became of a trajectory that was put."""

    SUCCESS = "success"
    FAIL = "fail"
    """It will never be accepted."""
    RE_ROLLOUT = "re-rollout"
    """Not kept. With reason `locked`, put the same one again; else roll it out again."""


class Reason(StrEnum):
    """Why a trajectory is not, or no longer, in the pool."""

    NONE = ""
    LOCKED = "locked"
    """Weights are being exchanged."""
    STALE = "stale"
    """Older than the bound when its iteration trains."""
    FAILED = "failed"
    """It has no reward; the ledger keeps it, the pool does not."""
    DUPLICATE = "duplicate"
    """It is here, or was handed out."""
    EMPTY = "no turns"
    CAPACITY = "capacity"
    """The pool was full, and older iterations need the room."""
    ON_DEMAND = "on demand"
    """Somebody asked for it."""


class Ready(StrEnum):
    """When a batch may be taken."""

    BATCH_SIZE_REACHED = "batch_size_reached"
    LOADED_BATCH_FINISHED = "loaded_batch_finished"
    """Everything that was loaded for it has an outcome."""
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class PoolResponse:
    word: Put
    reason: Reason = Reason.NONE


@dataclass(frozen=True, slots=True)
class PoolBatch:
    """Trajectories that are trained on together."""

    trajectories: list[Trajectory]
    model_tag: str

    def __len__(self) -> int:
        return len(self.trajectories)


@dataclass
class ModelPool:
    """The pool of one model."""

    store: Store
    finished: list[Trajectory] = field(default_factory=list)
    known: set[tuple[int, str]] = field(default_factory=set)
    """Names of what is here or was handed out."""
    locked: bool = False
    loaded: int = 0
    """Rollouts that were begun for the next batch."""
    ended: int = 0
    """Of them, those with an outcome."""

    def held(self) -> list[Trajectory]:
        return [*self.finished, *self.store.waiting()]


class TrajectoryPool:
    """See the module's docstring.

    Args:
        keys: what trajectories are grouped by, outermost first; none for the simple store.
        staleness: the oldest age that is kept; None for no bound.
        capacity: trajectories held for one model, at most; None for no limit.
    """

    def __init__(
        self,
        keys: Sequence[str] = ("group_id",),
        group_size: int = 1,
        *,
        batch_size: int = 1,
        ready: Ready = Ready.BATCH_SIZE_REACHED,
        staleness: int | None = None,
        capacity: int | None = None,
    ) -> None:
        if batch_size < 1 or (keys and batch_size % group_size):
            raise DataError(
                f"batch_size is {batch_size}, which is no multiple of group_size ({group_size}): a batch is whole groups."
            )
        self._new_store: Callable[[], Store] = lambda: build_store(keys, group_size)
        self._new_store()  # bad keys are told now
        self.batch_size, self.ready, self.staleness, self.capacity = batch_size, ready, staleness, capacity
        self._parts: dict[str, ModelPool] = {}

    def put(self, trajectory: Trajectory) -> PoolResponse:
        """Keep a trajectory, or say why not."""
        part = self._part(trajectory.model_tag)
        if part.locked:
            return PoolResponse(Put.RE_ROLLOUT, Reason.LOCKED)
        if trajectory.name in part.known:
            return PoolResponse(Put.FAIL, Reason.DUPLICATE)
        if trajectory.rollout.status is Status.FAILED:
            part.ended += 1
            return PoolResponse(Put.FAIL, Reason.FAILED)
        if not trajectory.versions:
            return PoolResponse(Put.FAIL, Reason.EMPTY)
        if self._is_stale(trajectory):
            return PoolResponse(Put.RE_ROLLOUT, Reason.STALE)
        if self.capacity is not None and len(part.held()) >= self.capacity:
            return PoolResponse(Put.RE_ROLLOUT, Reason.CAPACITY)
        part.known.add(trajectory.name)
        part.ended += 1
        part.finished += part.store.add(trajectory)
        return PoolResponse(Put.SUCCESS)

    def expect(self, count: int, model_tag: str = "default") -> None:
        """So many more rollouts were begun for the next batch (`loaded_batch_finished`)."""
        self._part(model_tag).loaded += count

    def is_ready(self, batch_size: int | None = None, model_tag: str = "default") -> bool:
        """Whether the ready rule lets a batch be taken."""
        part = self._part(model_tag)
        reached = len(part.finished) >= (batch_size or self.batch_size)
        ended = 0 < part.loaded <= part.ended
        return {
            Ready.BATCH_SIZE_REACHED: reached,
            Ready.LOADED_BATCH_FINISHED: ended and bool(part.finished),
            Ready.BOTH: reached and ended,
        }[self.ready]

    def get_batch(self, batch_size: int | None = None, model_tag: str = "default") -> PoolBatch | None:
        """The oldest finished trajectories, when the ready rule allows; None else.

        With `loaded_batch_finished`, all of them: a loaded batch may be short of what failed.
        """
        if model_tag not in self._parts or not self.is_ready(batch_size, model_tag):
            return None
        part = self._parts[model_tag]
        count = len(part.finished) if self.ready is Ready.LOADED_BATCH_FINISHED else batch_size or self.batch_size
        taken, part.finished = part.finished[:count], part.finished[count:]
        part.loaded = part.ended = 0
        return PoolBatch(taken, model_tag)

    def get_batch_any(self, batch_size: int | None = None) -> PoolBatch | None:
        """A batch of whichever model has one."""
        return next((batch for tag in self._parts if (batch := self.get_batch(batch_size, tag)) is not None), None)

    def take(self, group_ids: Iterable[tuple[int, str]], model_tag: str = "default") -> PoolBatch:
        """Everything of exactly these groups, each told by (iteration, group_id), in the order of groups and samples.

        A group may be short of rollouts that failed. This is how a controller's `Train` is carried out.
        """
        part = self._part(model_tag)
        wanted = {name: index for index, name in enumerate(group_ids)}
        taken = [t for t in part.held() if (t.iteration, t.rollout.group_id) in wanted]
        self._remove(part, taken, forget=False)
        taken.sort(key=lambda t: (wanted[(t.iteration, t.rollout.group_id)], t.rollout.sample))
        return PoolBatch(taken, model_tag)

    def evict(
        self,
        reason: Reason = Reason.STALE,
        *,
        trained_version: int | None = None,
        names: Collection[tuple[int, str]] = (),
        model_tag: str = "default",
    ) -> list[tuple[Trajectory, Reason]]:
        """Take out what is named, and what would be over the bound if the next step, from `trained_version`, trained on it.

        Returns what has to be rolled out again, and why. It may be put again afterwards.
        """
        part = self._part(model_tag)
        bound = self.staleness
        out = [
            trajectory
            for trajectory in part.held()
            if trajectory.name in names
            or (
                trained_version is not None and bound is not None and trained_version - min(trajectory.versions) > bound
            )
        ]
        self._remove(part, out, forget=True)
        return [(trajectory, reason) for trajectory in out]

    def lock(self, model_tag: str = "default") -> None:
        """Refuse what is put: weights are being exchanged."""
        self._part(model_tag).locked = True

    def unlock(self, model_tag: str = "default") -> None:
        self._part(model_tag).locked = False

    def is_empty(self, model_tag: str | None = None) -> bool:
        """Whether a model's part, or all of them, hold nothing."""
        parts = self._parts.values() if model_tag is None else [self._part(model_tag)]
        return not any(part.held() for part in parts)

    def model_tags(self) -> list[str]:
        return sorted(self._parts)

    def contents(self, model_tag: str = "default") -> list[Trajectory]:
        """What is held, by iteration, group and sample."""
        return sorted(self._part(model_tag).held(), key=lambda t: (t.iteration, t.rollout.group_id, t.rollout.sample))

    def _is_stale(self, trajectory: Trajectory) -> bool:
        """Whether it would be over the bound in its own iteration, which trains from version `iteration - 1`."""
        return self.staleness is not None and trajectory.iteration - 1 - min(trajectory.versions) > self.staleness

    def _part(self, model_tag: str) -> ModelPool:
        if model_tag not in self._parts:
            self._parts[model_tag] = ModelPool(self._new_store())
        return self._parts[model_tag]

    @staticmethod
    def _remove(part: ModelPool, trajectories: list[Trajectory], *, forget: bool) -> None:
        names = {trajectory.name for trajectory in trajectories}
        waiting = [trajectory for trajectory in part.store.waiting() if trajectory.name in names]
        for trajectory in waiting:
            part.store.discard(trajectory)
        siblings = {(t.iteration, t.rollout.group_id) for t in trajectories} if forget else set()
        kept = [t for t in part.finished if t.name not in names]
        part.finished = [t for t in kept if (t.iteration, t.rollout.group_id) not in siblings]
        for trajectory in kept:  # a group that lost a member is not finished any more
            if (trajectory.iteration, trajectory.rollout.group_id) in siblings:
                part.finished += part.store.add(trajectory)
        if forget:
            part.known -= names


def fill_from_stages(
    pool: TrajectoryPool, stages: Mapping[int, Location], model_tag: str = "default"
) -> dict[int, list[Rollout]]:
    """Put what the untrained iterations have on disk; return what was put, by iteration.

    Args:
        stages: the collect stage's directory of each iteration that is begun and not trained.
    """
    put: dict[int, list[Rollout]] = {}
    for iteration, stage in sorted(stages.items()):
        rollouts = [r for r in written_rollouts(stage) if r.status is not Status.FAILED and r.turns]
        kept = [r for r in rollouts if pool.put(Trajectory(r, iteration, model_tag)).word == "success"]
        put[iteration] = kept
    return put
