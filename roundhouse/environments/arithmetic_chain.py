"""Nested arithmetic with a calculator that takes one operator a call: the order of the steps has to be read off the brackets.

Invariant: the reward is 1 exactly when the rollout ends with "The answer is N." with the right N, else 0.

    What is ((3+4)*2)-5?  ->  calculate("3+4") = 7  ->  calculate("7*2") = 14  ->  calculate("14-5") = 9  ->  The answer is 9.

Every value on the way lies in -999..999, and no division occurs. A wrong demonstration stops before the last step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, tool
from roundhouse.environments.calculator import ERROR, Tally, answer_sentence, evaluate
from roundhouse.environments.generated import (
    GeneratedEnvironment,
    Message,
    calls,
    closing_text,
    distinct,
    returns,
    says,
)

LARGEST = 999


@dataclass(frozen=True, slots=True)
class Expression:
    """A number, or two expressions and an operator."""

    value: int
    operator: str = ""
    left: Expression | None = None
    right: Expression | None = None

    def __str__(self) -> str:
        if self.left is None or self.right is None:
            return str(self.value)
        return f"{_bracketed(self.left)}{self.operator}{_bracketed(self.right)}"

    def steps(self) -> Iterator[str]:
        """The one-operator expressions to calculate, innermost first, left before right."""
        if self.left is not None and self.right is not None:
            yield from self.left.steps()
            yield from self.right.steps()
            yield f"{self.left.value}{self.operator}{self.right.value}"


class ArithmeticChain(GeneratedEnvironment[Expression]):
    """`operators` operators in one expression; `problems` expressions over both splits."""

    name = "arithmetic_chain"
    restoration = "replay"

    def __init__(self, operators: int = 3, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        self._operators = operators
        made = distinct(lambda rng: draw(operators, rng), str, problems, f"arithmetic_chain with {operators} operators")
        super().__init__(made, heldout_fraction)

    def key(self, problem: Expression) -> str:
        return str(problem)

    def row(self, problem: Expression) -> TaskRow:
        return self.task(problem, f"What is {problem}?", answer=problem.value)

    async def seed_session(self, row: TaskRow) -> Tally:
        return Tally()

    @tool("Calculate with one operator.", expression="Two whole numbers with one of + - * between them.")
    async def calculate(self, session: Tally, expression: str) -> str:
        session.calls += 1
        value = evaluate(expression) if session.calls <= 2 * self._operators else ERROR
        session.errors += value == ERROR
        return value

    async def verify(self, session: Tally, row: TaskRow, response: dict[str, Any]) -> Verdict:
        right = closing_text(response) == answer_sentence(int(row["answer"]))
        metrics = {"tool_calls": float(session.calls), "tool_errors": float(session.errors)}
        return Verdict(reward=float(right), metrics=metrics)

    def demonstration(self, problem: Expression, right: bool, rng: random.Random) -> Iterator[Message]:
        steps = list(problem.steps())
        shown = steps if right else steps[:-1]
        value = "0"
        for number, step in enumerate(shown, 1):
            value = evaluate(step)
            yield calls("calculate", f"call_{number}", expression=step)
            yield returns(f"call_{number}", value)
        if not right and int(value) == problem.value:
            value = str(problem.value + 1)
        yield says(answer_sentence(int(value)))


def draw(operators: int, rng: random.Random) -> Expression:
    """An expression with that many operators, every value on the way at most LARGEST in size."""
    if operators == 0:
        return Expression(rng.randint(2, 12))
    while True:
        on_the_left = rng.randrange(operators)
        left, right = draw(on_the_left, rng), draw(operators - 1 - on_the_left, rng)
        operator = rng.choice("+-*")
        value = {"+": left.value + right.value, "-": left.value - right.value, "*": left.value * right.value}[operator]
        if abs(value) <= LARGEST:
            return Expression(value, operator, left, right)


def _bracketed(part: Expression) -> str:
    return str(part) if part.left is None else f"({part})"
