"""Single turn: reach a target by an expression over given numbers, each used at most once.

Invariant: the reward is 1 exactly when the reply is an expression of + - * / and brackets over the given numbers, each used no
more often than it is given, with the target as its exact value. It has two components: `form` (0.1) for such an expression
whatever its value, `target` (0.9) for the value. Text is parsed, never executed, and division is exact.

    Make 6 from 3 5 8.  ->  3+(8-5)   1.0
                            8-5       0.1: well formed, but 3
                            3+3       0.0: 3 is given once

The target of a problem is the value of a drawn expression over all its numbers, so that a solution exists. A wrong
demonstration is a well-formed expression with another value.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.generated import GeneratedEnvironment, Message, closing_text, distinct, says

FORM, TARGET = 0.1, 0.9
LONGEST = 200
"""Characters of a reply that are read; a longer one is no expression."""
LARGEST = 99


@dataclass(frozen=True, slots=True)
class Puzzle:
    """`solution` uses each of `numbers` once and has the value `target`."""

    numbers: tuple[int, ...]
    target: int
    solution: str


class Countdown(GeneratedEnvironment[Puzzle]):
    """Puzzles over `numbers` numbers of 1..`largest`, with targets in 1..99."""

    name = "countdown"
    restoration = "replay"

    def __init__(
        self, numbers: int = 3, largest: int = 12, problems: int = 4000, heldout_fraction: float = 0.2
    ) -> None:
        made = distinct(
            lambda rng: draw(numbers, largest, rng), self.key, problems, f"countdown with {numbers} numbers"
        )
        super().__init__(made, heldout_fraction)

    def key(self, problem: Puzzle) -> str:
        return f"{'-'.join(map(str, problem.numbers))}/{problem.target}"

    def row(self, problem: Puzzle) -> TaskRow:
        prompt = f"Make {problem.target} from {' '.join(map(str, problem.numbers))}."
        return self.task(problem, prompt, numbers=list(problem.numbers), target=problem.target)

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        value = value_of(closing_text(response) or "", row["numbers"])
        form, hit = FORM * (value is not None), TARGET * (value == row["target"])
        return Verdict(form + hit, {"form": form, "target": hit})

    def demonstration(self, problem: Puzzle, right: bool, rng: random.Random) -> Iterator[Message]:
        reply = problem.solution
        while not right and value_of(reply, problem.numbers) == problem.target:
            reply = _combined(problem.numbers, rng)
        yield says(reply)


def draw(numbers: int, largest: int, rng: random.Random) -> Puzzle:
    """A puzzle with a solution that uses all its numbers."""
    while True:
        given = tuple(sorted(rng.randint(1, largest) for _ in range(numbers)))
        solution = _combined(given, rng)
        value = value_of(solution, given)
        if value is not None and value.denominator == 1 and 1 <= value <= LARGEST:
            return Puzzle(given, int(value), solution)


def value_of(text: str, numbers: list[int] | tuple[int, ...]) -> Fraction | None:
    """The exact value of an expression over `numbers`; None when `text` is no such expression or has no value."""
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
        raise ValueError(f"{type(node).__name__} is no operation of the puzzle")
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
    raise ValueError(f"{type(node.op).__name__} is no operation of the puzzle")


def _combined(numbers: tuple[int, ...], rng: random.Random) -> str:
    """A random expression over all the numbers."""
    parts = [str(number) for number in numbers]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        joined = f"{left}{rng.choice('+-*/')}{right}"
        parts.append(f"({joined})" if parts else joined)
    return parts[0]
