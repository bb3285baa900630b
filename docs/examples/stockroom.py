"""An environment of your own, as docs/tutorial.md builds it: look at two shelves, then say which holds more.

Which is more, bolts or nuts?  ->  count(bolts) = 4  ->  count(nuts) = 7  ->  nuts
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from roundhouse.gym.environment import TaskRow, Verdict, tool
from roundhouse.gym.environments.conversations import Message, calls, closing_text, returns, says
from roundhouse.gym.environments.generated import GeneratedEnvironment

GOODS = ("bolts", "nuts", "nails", "screws", "hooks", "rings", "pins", "springs")
Problem = tuple[str, str, int, int]
"""Two goods and how many there are of each, never equally many."""


class Stockroom(GeneratedEnvironment[Problem]):
    """Which of two goods there is more of; only the tool knows."""

    name = "stockroom"
    restoration = "replay"  # the tool answers the same every time, so an interrupted rollout can go on

    def __init__(self, most: int = 9, heldout_fraction: float = 0.2) -> None:
        pairs, counts = permutations(GOODS, 2), list(permutations(range(1, most + 1), 2))
        super().__init__([(*pair, *count) for pair in pairs for count in counts], heldout_fraction)

    def key(self, problem: Problem) -> str:
        return "-".join(map(str, problem))

    def row(self, problem: Problem) -> TaskRow:
        first, second, a, b = problem
        stock = {first: a, second: b}
        return self.task(
            problem, f"Which is more, {first} or {second}?", stock=stock, answer=first if a > b else second
        )

    async def seed_session(self, row: TaskRow) -> dict[str, int]:
        return dict(row["stock"])

    @tool("How many there are on the shelf.", goods="Name of the goods.")
    async def count(self, session: dict[str, int], goods: str) -> str:
        return str(session.get(goods, "no such shelf"))

    async def verify(self, session: dict[str, int], row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(reward=float(closing_text(response) == row["answer"]))

    def demonstration(self, problem: Problem, right: bool, rng: random.Random) -> Iterator[Message]:
        """Right: look at both shelves. Wrong: look at one or at none, and name either."""
        first, second, a, b = problem
        looked = [(first, a), (second, b)] if right else [(first, a)][: rng.randrange(2)]
        for number, (goods, there) in enumerate(looked, start=1):
            yield calls("count", f"call_{number}", goods=goods)
            yield returns(f"call_{number}", str(there))
        yield says((first if a > b else second) if right else rng.choice((first, second)))
