"""An environment of your own, as docs/tutorial.md builds it: goods lie in boxes, boxes stand on shelves, only tools know where.

Where are the bolts?  ->  box_of(bolts) = 17  ->  shelf_of(17) = C  ->  C
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, closing_text, tool
from roundhouse.environments.generated import GeneratedEnvironment, Message, calls, returns, says

GOODS = ("bolts", "nuts", "nails", "screws", "hooks", "rings", "pins", "springs")
SHELVES = "ABCDEFGH"
Problem = tuple[str, int, str]
"""Goods, their box, its shelf."""


class Stockroom(GeneratedEnvironment[Problem]):
    """Find goods in two steps. A guess is right once in eight times."""

    name = "stockroom"
    restoration = "replay"  # the tools answer the same every time, so an interrupted rollout can go on

    def __init__(self, boxes: int = 40, heldout_fraction: float = 0.2) -> None:
        super().__init__(product(GOODS, range(10, 10 + boxes), SHELVES), heldout_fraction)

    def key(self, problem: Problem) -> str:
        return "-".join(map(str, problem))

    def row(self, problem: Problem) -> TaskRow:
        goods, box, shelf = problem
        return self.task(problem, f"Where are the {goods}?", goods=goods, box=box, answer=shelf)

    async def seed_session(self, row: TaskRow) -> TaskRow:
        return row

    @tool("The number of the box that goods lie in.", goods="Name of the goods.")
    async def box_of(self, session: TaskRow, goods: str) -> str:
        return str(session["box"]) if goods == session["goods"] else "no such goods"

    @tool("The shelf that a box stands on.", box="Number of the box.")
    async def shelf_of(self, session: TaskRow, box: int) -> str:
        return str(session["answer"]) if box == session["box"] else "no such box"

    async def verify(self, session: TaskRow, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(reward=float(closing_text(response) == row["answer"]))

    def demonstration(self, problem: Problem, right: bool, rng: random.Random) -> Iterator[Message]:
        """Right: look up the box, then its shelf. Wrong: name any shelf, at once or after the first step."""
        goods, box, shelf = problem
        if right or rng.random() < 0.5:
            yield calls("box_of", "call_1", goods=goods)
            yield returns("call_1", str(box))
        if right:
            yield calls("shelf_of", "call_2", box=box)
            yield returns("call_2", shelf)
        yield says(shelf if right else rng.choice(SHELVES))
