"""What an iteration will roll out, decided before anything runs: which tasks, and which rollouts of each.

Invariants: the plan is a pure function of rows, group size, run seed and iteration, so that a resumed run and another machine
choose the same; rollout ids in it are unique; the seed of a rollout depends on nothing but run seed, iteration, group and
sample, so that a retry draws the same. The tasks of iterations 0, 1, 2, … in a row are epochs, each a shuffle of all tasks; no
task comes twice in an epoch. (An iteration that spans two epochs may therefore hold a task twice.)

    rows a b, group size 2        ->  a/0 a/1 b/0 b/1
    rows a b c, 2 an iteration    ->  c a | b · a | b c      (· begins epoch 1)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError, DataError, RoundhouseError
from roundhouse.trajectories.tokens import derive_seed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One rollout to make."""

    group_id: str
    sample: int
    row: TaskRow
    seed: int

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.sample}"


class ReorderError(RoundhouseError):
    """Results do not match the plan one to one."""


def plan_rollouts(
    rows: Sequence[TaskRow], group_size: int, seed: int, iteration: int, *, named_by_iteration: bool = False
) -> list[RolloutSpec]:
    """`group_size` rollouts of each row. A task that comes again in the same plan makes a group of its own, `<task_id>#2`.

    Args:
        named_by_iteration: groups are called `<task_id>@<iteration>`, for datasets with groups of several iterations. Their
            seeds are the same.

    Raises:
        DataError: a row has no task_id.
    """
    specs = []
    times: dict[str, int] = {}
    for index, row in enumerate(rows):
        if not row.get("task_id"):
            raise DataError(f"Task row {index} has no task_id: rollouts of different tasks could not be told apart.")
        task_id = str(row["task_id"])
        times[task_id] = times.get(task_id, 0) + 1
        group_id = task_id if times[task_id] == 1 else f"{task_id}#{times[task_id]}"
        name = f"{group_id}@{iteration}" if named_by_iteration else group_id
        for sample in range(group_size):
            specs.append(RolloutSpec(name, sample, row, derive_seed(seed, iteration, group_id, sample)))
    return specs


def reorder(results: Iterable[tuple[int, T]], count: int) -> list[T]:
    """Results by their index in the plan, as a list in the plan's order.

    Raises:
        ReorderError: an index is missing, comes twice, lies outside 0..count-1 or is no whole number; the text names all of
            them.
    """
    found: dict[int, T] = {}
    duplicate, outside = set(), set()
    no_index: list[Any] = []
    for index, result in results:
        if type(index) is not int:
            no_index.append(index)
        elif not 0 <= index < count:
            outside.add(index)
        elif index in found:
            duplicate.add(index)
        else:
            found[index] = result
    missing = [index for index in range(count) if index not in found]
    if missing or duplicate or outside or no_index:
        named = f", no whole number {no_index}" if no_index else ""
        raise ReorderError(
            f"Results do not match the plan of {count} rollouts: missing {missing}, duplicate {sorted(duplicate)}, "
            f"out of range {sorted(outside)}{named}."
        )
    return [found[index] for index in range(count)]


def sample_tasks(rows: Sequence[TaskRow], seed: int, iteration: int, n: int) -> list[TaskRow]:
    """The `n` task rows of an iteration (counted from 0; `n` is the same in all of them).

    Raises:
        ConfigError: there are no rows.
    """
    if not rows:
        raise ConfigError(
            "The environment has no training tasks to sample from: check `environment` in the configuration."
        )
    orders: dict[int, list[int]] = {}
    chosen = []
    for position in range(iteration * n, (iteration + 1) * n):
        epoch, place = divmod(position, len(rows))
        if epoch not in orders:
            orders[epoch] = list(range(len(rows)))
            random.Random(derive_seed(seed, "task order", epoch)).shuffle(orders[epoch])
        chosen.append(rows[orders[epoch][place]])
    return chosen
