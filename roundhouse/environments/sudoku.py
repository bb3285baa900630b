"""Single turn: fill in a 4x4 sudoku.

Invariant: the reward is 1 exactly when the reply is a grid of four lines of four digits that keeps the given cells and has each
of 1..4 once in every row, column and 2x2 box. It is the sum of its components: `form` (0.1) for a grid that keeps what is
given, and, for such a grid alone, `rows`, `columns` and `boxes` (0.3 each, times the share of them that are right).

    1.34        1234
    34.2   ->   3412
    2143        2143
    432.        4321

Every problem has exactly one solution. A wrong demonstration has two digits of one row exchanged.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.generated import GeneratedEnvironment, Message, closing_text, distinct, says

FORM, PART = 0.1, 0.3
EMPTY = "."
CELLS = range(16)
ROWS = [[4 * row + column for column in range(4)] for row in range(4)]
COLUMNS = [list(cells) for cells in zip(*ROWS, strict=True)]
BOXES = [[8 * (box // 2) + 2 * (box % 2) + offset for offset in (0, 1, 4, 5)] for box in range(4)]


@dataclass(frozen=True, slots=True)
class Grid:
    """16 cells in reading order: `given` has dots where `solution` is to be found."""

    given: str
    solution: str


class Sudoku(GeneratedEnvironment[Grid]):
    """Grids with `blanks` empty cells."""

    name = "sudoku"
    restoration = "replay"

    def __init__(self, blanks: int = 5, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        made = distinct(lambda rng: draw(blanks, rng), self.key, problems, f"sudoku with {blanks} blanks")
        super().__init__(made, heldout_fraction)

    def key(self, problem: Grid) -> str:
        return problem.given

    def row(self, problem: Grid) -> TaskRow:
        return self.task(problem, f"Fill in:\n{_lines(problem.given)}", given=problem.given)

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        parts = judge(closing_text(response) or "", row["given"])
        return Verdict(math.fsum(parts.values()), parts)

    def demonstration(self, problem: Grid, right: bool, rng: random.Random) -> Iterator[Message]:
        cells = list(problem.solution)
        if not right:
            first, second = rng.sample(rng.choice(ROWS), 2)
            cells[first], cells[second] = cells[second], cells[first]
        yield says(_lines("".join(cells)))


def judge(reply: str, given: str) -> dict[str, float]:
    """The components of a reply's reward."""
    lines = reply.strip().split("\n")
    cells = "".join(lines)
    shaped = len(lines) == 4 and all(len(line) == 4 for line in lines) and set(cells) <= set("1234")
    if not shaped or any(told not in (EMPTY, cell) for told, cell in zip(given, cells, strict=True)):
        return {"form": 0.0, "rows": 0.0, "columns": 0.0, "boxes": 0.0}
    units = {"rows": ROWS, "columns": COLUMNS, "boxes": BOXES}
    return {"form": FORM} | {name: PART * _share(cells, each) for name, each in units.items()}


def _share(cells: str, units: list[list[int]]) -> float:
    return sum(len({cells[cell] for cell in unit}) == 4 for unit in units) / 4


@functools.cache
def solutions() -> tuple[str, ...]:
    """All 288 solved grids."""
    grids = [""]
    for _ in range(4):
        rows = ("".join(row) for row in permutations("1234"))
        grids = [
            grid + row
            for grid, row in product(grids, rows)
            if all(row[place % 4] != cell for place, cell in enumerate(grid))
        ]
    return tuple(grid for grid in grids if _share(grid, BOXES) == 1)


def draw(blanks: int, rng: random.Random) -> Grid:
    """A solved grid with that many cells emptied, such that it stays the only solution."""
    while True:
        solution = rng.choice(solutions())
        emptied = set(rng.sample(CELLS, blanks))
        kept = [cell for cell in CELLS if cell not in emptied]
        if sum(all(grid[cell] == solution[cell] for cell in kept) for grid in solutions()) == 1:
            return Grid("".join(EMPTY if cell in emptied else solution[cell] for cell in CELLS), solution)


def _lines(cells: str) -> str:
    return "\n".join(cells[start : start + 4] for start in range(0, 16, 4))
