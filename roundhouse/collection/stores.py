"""Where trajectories wait until they can be trained on: alone, in groups, in groups of groups.

Invariant: a trajectory is in a store once, either waiting for the rest of its group or finished; a group is finished at once
and whole, with exactly `group_size` members, all of one iteration.

    simple        every trajectory is finished when it comes
    grouped       key "group_id": finished when the group has `group_size`
    hierarchical  keys "environment", "group_id": the same for the leaves of a tree, so that equal ids in two environments are
                  two groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from roundhouse.errors import DataError
from roundhouse.trajectories.records import Rollout

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
