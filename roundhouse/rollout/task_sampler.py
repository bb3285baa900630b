"""Which tasks an iteration works on: a pure function, so that a resumed run and another machine choose the same.

Invariant: the tasks of iterations 0, 1, 2, … in a row are epochs, each a shuffle of all tasks; no task comes twice in an
epoch. (An iteration that spans two epochs may therefore hold a task twice.)

    rows a b c, 2 an iteration:   c a | b · a | b c      (· begins epoch 1)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError
from roundhouse.trajectories.tokens import derive_seed


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
            orders[epoch] = _shuffled(len(rows), derive_seed(seed, "task order", epoch))
        chosen.append(rows[orders[epoch][place]])
    return chosen


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
