"""Which problems are held out: a pure function of the problem's name, so that every process agrees without a file.

Invariant: train and held-out together are all problems, and share none. The order is fixed and unrelated to the problems'
natural order (it is the order of their digests), so that any stretch of tasks is a fair sample.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar, overload

from roundhouse.environments.base import Split, TaskRow
from roundhouse.errors import ConfigError

P = TypeVar("P")


def position(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone, evenly spread over names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def split_problems(problems: Iterable[P], name: Callable[[P], str], heldout_fraction: float) -> dict[Split, list[P]]:
    """Deal `problems` into train and held-out by the digests of their names.

    Raises:
        ConfigError: nothing is left to train on.
    """
    placed = sorted((position(name(problem)), index, problem) for index, problem in enumerate(problems))
    heldout = [problem for place, _, problem in placed if place < heldout_fraction]
    train = [problem for place, _, problem in placed if place >= heldout_fraction]
    if not train:
        raise ConfigError(
            f"environment.heldout_fraction is {heldout_fraction}: no task is left to train on. Lower it (0.2 is usual)."
        )
    return {"train": train, "heldout": heldout}


def deal(shares: dict[str, float], count: int, rng: random.Random) -> list[str]:
    """`count` names in random order, each as often as its share says (to the nearest whole).

    >>> sorted(deal({"a": 0.25, "b": 0.75}, 4, random.Random(0)))
    ['a', 'b', 'b', 'b']
    """
    total = sum(shares.values())
    names: list[str] = []
    reached = 0.0
    for name, share in shares.items():
        reached += share / total
        names += [name] * (round(reached * count) - len(names))
    rng.shuffle(names)
    return names


class TaskList(Sequence[TaskRow], Generic[P]):
    """Task rows made when they are asked for: a split may have tens of thousands of problems."""

    def __init__(self, problems: Sequence[P], row: Callable[[P], TaskRow]) -> None:
        self._problems = problems
        self._row = row

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> TaskRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskRow]: ...
    def __getitem__(self, index: int | slice) -> TaskRow | Sequence[TaskRow]:
        if isinstance(index, slice):
            return TaskList(self._problems[index], self._row)
        return self._row(self._problems[index])
