"""Environments of one turn: no tool, one reply, judged by its text alone.

Invariant: a solution to every problem exists, and the reward is 1 exactly if the reply is one. Replies are parsed,
never executed.

    Sort 4 1 6 2 9 3.                                           ->   1 2 3 4 6 9
    Make 6 from 3 5 8.                                          ->   3+(8-5)
    1.34 34.2 2143 432. (sudoku)                                ->   1234 3412 2143 4321
    Write words. Use 4 words. Include "moon". Sort the words.   ->   cat moon sky tree
"""

from __future__ import annotations

import ast
import functools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product
from typing import Any

from roundhouse.environments.base import Environment, Split, TaskList, TaskRow, Verdict, closing_text, task_row
from roundhouse.environments.generated import GeneratedEnvironment, Message, deal, distinct, says, split_problems, user


class Sort(Environment):
    """Order the given digits: all ordered choices of `digits` different digits from 1..9.

    The reward is 1 exactly if the reply is the digits in ascending order, separated by single spaces, else 0. A
    held-out problem is one order, not one set. A wrong demonstration has two neighbours exchanged.
    """

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


COUNTDOWN_FORM, TARGET = 0.1, 0.9
LONGEST = 200
"""Characters of a reply that are read; a longer one does not count as an expression."""
LARGEST = 99


@dataclass(frozen=True, slots=True)
class Puzzle:
    """`solution` uses each of `numbers` once and has the value `target`."""

    numbers: tuple[int, ...]
    target: int
    solution: str


class Countdown(GeneratedEnvironment[Puzzle]):
    """Reach a target in 1..99 by an expression over `numbers` numbers of 1..`largest`, each used at most once.

    The reward is 1 exactly if the reply is such an expression of + - * / and brackets with the target as its exact
    value. Components: `form` (0.1) for an expression of any value, `target` (0.9) for the value. The target is the
    value of a drawn expression, so a solution exists. A wrong demonstration has another value.

        Make 6 from 3 5 8.  ->  3+(8-5)   1.0
                                8-5       0.1: well formed, but 3
                                3+3       0.0: 3 is given once
    """

    name = "countdown"
    restoration = "replay"

    def __init__(
        self, numbers: int = 3, largest: int = 12, problems: int = 4000, heldout_fraction: float = 0.2
    ) -> None:
        problems_drawn = distinct(
            lambda rng: draw_numbers(numbers, largest, rng), self.key, problems, f"countdown with {numbers} numbers"
        )
        super().__init__(problems_drawn, heldout_fraction)

    def key(self, problem: Puzzle) -> str:
        return f"{'-'.join(map(str, problem.numbers))}/{problem.target}"

    def row(self, problem: Puzzle) -> TaskRow:
        prompt = f"Make {problem.target} from {' '.join(map(str, problem.numbers))}."
        return self.task(problem, prompt, numbers=list(problem.numbers), target=problem.target)

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        value = value_of(closing_text(response) or "", row["numbers"])
        form, hit = COUNTDOWN_FORM * (value is not None), TARGET * (value == row["target"])
        return Verdict(form + hit, {"form": form, "target": hit})

    def demonstration(self, problem: Puzzle, right: bool, rng: random.Random) -> Iterator[Message]:
        reply = problem.solution
        while not right and value_of(reply, problem.numbers) == problem.target:
            reply = _combined(problem.numbers, rng)
        yield says(reply)


def draw_numbers(numbers: int, largest: int, rng: random.Random) -> Puzzle:
    """A puzzle with a solution that uses all its numbers."""
    while True:
        drawn = tuple(sorted(rng.randint(1, largest) for _ in range(numbers)))
        solution = _combined(drawn, rng)
        value = value_of(solution, drawn)
        if value is not None and value.denominator == 1 and 1 <= value <= LARGEST:
            return Puzzle(drawn, int(value), solution)


def value_of(text: str, numbers: list[int] | tuple[int, ...]) -> Fraction | None:
    """Return the exact value of an expression over `numbers`; None if `text` is not such an expression or its value is
    undefined."""
    if len(text) > LONGEST:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        used: Counter[int] = Counter()
        value = _value(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return None
    return value if used <= Counter(numbers) else None


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    """The value of a tree of the four operations; `used` counts its numbers.

    Raises:
        ValueError: anything else occurs in it.
        ZeroDivisionError
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise ValueError(f"{type(node).__name__} is not an operation of the puzzle")
    left, right = _value(node.left, used), _value(node.right, used)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
    raise ValueError(f"{type(node.op).__name__} is not an operation of the puzzle")


def _combined(numbers: tuple[int, ...], rng: random.Random) -> str:
    """A random expression over all the numbers."""
    parts = [str(number) for number in numbers]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        joined = f"{left}{rng.choice('+-*/')}{right}"
        parts.append(f"({joined})" if parts else joined)
    return parts[0]


SUDOKU_FORM, PART = 0.1, 0.3
EMPTY = "."
CELLS = range(16)
ROWS = [[4 * row + column for column in range(4)] for row in range(4)]
COLUMNS = [list(cells) for cells in zip(*ROWS, strict=True)]
BOXES = [[8 * (box // 2) + 2 * (box % 2) + offset for offset in (0, 1, 4, 5)] for box in range(4)]


@dataclass(frozen=True, slots=True)
class Grid:
    """16 cells in reading order: `given` has dots for cells to find in `solution`."""

    given: str
    solution: str


class Sudoku(GeneratedEnvironment[Grid]):
    """Fill in 4x4 sudokus of `blanks` empty cells with exactly one solution.

    The reward is 1 exactly if the reply is a grid that keeps the given cells and has each of 1..4 once in every row,
    column and 2x2 box. Components: `form` (0.1) for a grid that keeps the given cells, and, only then, `rows`,
    `columns` and `boxes` (0.3 each, times the right share). A wrong demonstration has two digits of one row exchanged.

        1.34        1234
        34.2   ->   3412
        2143        2143
        432.        4321
    """

    name = "sudoku"
    restoration = "replay"

    def __init__(self, blanks: int = 5, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        grids = distinct(lambda rng: draw_grid(blanks, rng), self.key, problems, f"sudoku with {blanks} blanks")
        super().__init__(grids, heldout_fraction)

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
    if not shaped or any(given_cell not in (EMPTY, cell) for given_cell, cell in zip(given, cells, strict=True)):
        return {"form": 0.0, "rows": 0.0, "columns": 0.0, "boxes": 0.0}
    units = {"rows": ROWS, "columns": COLUMNS, "boxes": BOXES}
    return {"form": SUDOKU_FORM} | {name: PART * _share(cells, each) for name, each in units.items()}


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


def draw_grid(blanks: int, rng: random.Random) -> Grid:
    """A solved grid with that many cells emptied, such that it stays the only solution."""
    while True:
        solution = rng.choice(solutions())
        emptied = set(rng.sample(CELLS, blanks))
        visible = [cell for cell in CELLS if cell not in emptied]
        if sum(all(grid[cell] == solution[cell] for cell in visible) for grid in solutions()) == 1:
            return Grid("".join(EMPTY if cell in emptied else solution[cell] for cell in CELLS), solution)


def _lines(cells: str) -> str:
    return "\n".join(cells[start : start + 4] for start in range(0, 16, 4))


ALL, PARTS = 0.5, 0.5
WORDS = [
    "bird",
    "boat",
    "cat",
    "cloud",
    "dog",
    "fish",
    "fox",
    "frog",
    "hill",
    "lake",
    "leaf",
    "moon",
    "rain",
    "road",
    "rock",
    "sky",
    "snow",
    "star",
    "sun",
    "tree",
    "wind",
    "wolf",
]

Constraint = tuple[str, str | int]
"""A kind and its value, in the row's form."""

TEXTS: dict[str, str] = {
    "count": "Use {} words.",
    "include": 'Include "{}".',
    "forbid": 'Never use the letter "{}".',
    "first": 'Begin with "{}".',
    "last": 'End with "{}".',
    "order": "Sort the words.",
    "upper": "Use capital letters only.",
    "comma": "Put a comma between the words.",
    "json": 'Answer with a JSON object whose key "{}" has the list of words.',
}

CHECKS: dict[str, Callable[[str, list[str], Any], bool]] = {
    "count": lambda reply, words, value: len(words) == value,
    "include": lambda reply, words, value: value in words,
    "forbid": lambda reply, words, value: bool(words) and not any(value in word for word in words),
    "first": lambda reply, words, value: words[:1] == [value],
    "last": lambda reply, words, value: words[-1:] == [value],
    "order": lambda reply, words, value: len(words) > 1 and words == sorted(words),
    "upper": lambda reply, words, value: bool(words) and reply == reply.upper(),
    "comma": lambda reply, words, value: len(words) > 1 and ", ".join(words).lower() == reply.lower(),
    "json": lambda reply, words, value: _json_words(reply, value) is not None,
}
"""From the reply, its words in lower case and the constraint's value to whether it holds."""


@dataclass(frozen=True, slots=True)
class Brief:
    """Constraints that `words` satisfies, in the form of `reply`."""

    constraints: tuple[Constraint, ...]
    words: tuple[str, ...]

    @property
    def reply(self) -> str:
        return written(self.words, dict(self.constraints))


class InstructionConstraints(GeneratedEnvironment[Brief]):
    """Write a few words that satisfy 1..`constraints` checkable constraints.

    The reward is 1 exactly if the reply satisfies all; otherwise it is the satisfied share, but at most one half, so
    that omitting one never pays. `reward_components` has a part per constraint and `all`. Constraints are drawn so that
    a reply exists. A wrong demonstration breaks one.

        Write words. Use 4 words. Include "moon". Sort the words.   ->   cat moon sky tree   1.0
                                                                         moon cat tree sky   0.33 (not sorted)
    """

    name = "instruction_constraints"
    restoration = "replay"

    def __init__(self, constraints: int = 3, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        briefs = distinct(
            lambda rng: draw_brief(constraints, rng), self.key, problems, f"briefs of {constraints} constraints"
        )
        super().__init__(briefs, heldout_fraction)

    def key(self, problem: Brief) -> str:
        return " ".join(TEXTS[kind].format(value) for kind, value in problem.constraints)

    def row(self, problem: Brief) -> TaskRow:
        constraints = [list(constraint) for constraint in problem.constraints]
        return self.task(problem, f"Write words. {self.key(problem)}", constraints=constraints)

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        satisfied_by_kind = satisfied(
            closing_text(response) or "", [(kind, value) for kind, value in row["constraints"]]
        )
        parts = {
            kind: PARTS * is_satisfied / len(satisfied_by_kind) for kind, is_satisfied in satisfied_by_kind.items()
        }
        parts["all"] = ALL * all(satisfied_by_kind.values())
        return Verdict(
            sum(parts.values()), parts, {"satisfied": sum(satisfied_by_kind.values()) / len(satisfied_by_kind)}
        )

    def demonstration(self, problem: Brief, right: bool, rng: random.Random) -> Iterator[Message]:
        reply = problem.reply
        while not right and all(satisfied(reply, problem.constraints).values()):
            words = rng.sample(WORDS, max(2, len(problem.words) + rng.randint(-1, 1)))
            reply = written(tuple(words), dict(rng.sample(problem.constraints, len(problem.constraints) - 1)))
        yield says(reply)


def satisfied(reply: str, constraints: Any) -> dict[str, bool]:
    """Return the constraints that a reply satisfies, by kind."""
    value = dict(constraints)
    words = _json_words(reply, value["json"]) if "json" in value else None
    if words is None:
        words = reply.lower().replace(",", " ").split()
    return {kind: CHECKS[kind](reply, words, expected) for kind, expected in constraints}


def draw_brief(constraints: int, rng: random.Random) -> Brief:
    """Words, and constraints that hold for them. JSON keeps its own punctuation and case."""
    words = tuple(rng.sample(WORDS, rng.randint(2, 5)))
    kinds = rng.sample(sorted(TEXTS), rng.randint(1, constraints))
    if "json" in kinds:
        kinds = [kind for kind in kinds if kind not in ("comma", "upper")]
    if "order" in kinds:
        words = tuple(sorted(words))
    unused = [letter for letter in "abcdefilmnorstw" if not any(letter in word for word in words)]
    if not unused:
        return draw_brief(constraints, rng)
    value: dict[str, str | int] = {
        "count": len(words),
        "include": rng.choice(words),
        "forbid": rng.choice(unused),
        "first": words[0],
        "last": words[-1],
        "json": rng.choice(("words", "items", "list")),
    }
    return Brief(tuple((kind, value.get(kind, "")) for kind in kinds), words)


def written(words: tuple[str, ...], constraints: dict[str, str | int]) -> str:
    """The words in the form that the constraints ask for."""
    if "json" in constraints:
        return json.dumps({constraints["json"]: list(words)})
    text = (", " if "comma" in constraints else " ").join(words)
    return text.upper() if "upper" in constraints else text


def _json_words(reply: str, key: str) -> list[str] | None:
    """Return the words of a JSON object under its only key, in lower case; None for any other reply."""
    try:
        value = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or list(value) != [key] or not isinstance(value[key], list):
        return None
    return [word.lower() for word in value[key]] if all(isinstance(word, str) for word in value[key]) else None
