"""Single turn: put the given digits in order.

Invariant: the reward is 1 exactly when the reply is the digits in ascending order, separated by single spaces, else 0.

    Sort 4 1 6 2 9 3.  ->  1 2 3 4 6 9

The digits of a problem all differ. The wrong demonstrations have two neighbours exchanged somewhere: training sharpens a
skill that the warm start has mostly taught already.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, task_row
from roundhouse.environments.generated import Message, TaskList, closing_text, deal, says, split_problems, user


class Sort(Environment):
    """All ordered choices of `digits` different digits from 1..9; a held-out problem is one order, not one set."""

    name = "sort"
    restoration = "replay"

    def __init__(self, digits: int = 6, heldout_fraction: float = 0.2) -> None:
        self._problems = split_problems(permutations("123456789", digits), _task_id, heldout_fraction)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return TaskList(
            self._problems[split],
            lambda digits: task_row(question(digits), task_id=_task_id(digits), answer=" ".join(sorted(digits))),
        )

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(reward=float(closing_text(response) == row["answer"]))

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[Message]]:
        """`good_fraction` of them are sorted, the rest have one pair of neighbours exchanged."""
        rng = random.Random(seed)
        demonstrations = []
        for kind in deal({"right": good_fraction, "exchanged": 1 - good_fraction}, count, rng):
            digits = rng.choice(self._problems[split])
            reply = sorted(digits)
            if kind == "exchanged":
                at = rng.randrange(len(reply) - 1)
                reply[at], reply[at + 1] = reply[at + 1], reply[at]
            demonstrations.append([user(question(digits)), says(" ".join(reply))])
        return demonstrations


def question(digits: Sequence[str]) -> str:
    return f"Sort {' '.join(digits)}."


def _task_id(digits: Sequence[str]) -> str:
    return f"sort/{''.join(digits)}"
