"""Arithmetic with a calculator that takes one operator a call: in two steps, and along a chain of brackets.

Calculator: two steps.

Invariant: the reward is 1 exactly if the rollout ends with the sentence "The answer is N." with the right N, else 0.
The method is not judged, but the policy cannot calculate, so only using the tool twice is reliable:

    What is 3*4+5?  ->  calculate("3*4") = 12  ->  calculate("12+5") = 17  ->  The answer is 17.

The demonstrations show this procedure and three wrong ones; training must find the right one.

Arithmetic chain: nested, so that the brackets give the order of the steps.

Invariant: the reward is 1 exactly if the rollout ends with "The answer is N." with the right N, else 0.

    What is ((3+4)*2)-5?  ->  calculate("3+4") = 7  ->  calculate("7*2") = 14  ->  calculate("14-5") = 9  ->  The answer is 9.

Every intermediate value is in -999..999, without division. A wrong demonstration stops before the last step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import Environment, Split, TaskList, TaskRow, Verdict, closing_text, task_row, tool
from roundhouse.environments.generated import (
    GeneratedEnvironment,
    Message,
    calls,
    deal,
    distinct,
    returns,
    says,
    split_problems,
    user,
)

MAX_CALLS = 3
ERROR = "error"
_EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*", re.ASCII)

WRONG_PROCEDURES = {"guess": 0.34, "stop_after_product": 0.26, "finish_in_head": 0.15}
"""Shares of the wrong demonstrations among all when a quarter is right; for other shares they keep their proportions."""


@dataclass(frozen=True, slots=True, order=True)
class CalculatorProblem:
    """a*b+c"""

    a: int
    b: int
    c: int

    @property
    def text(self) -> str:
        return f"{self.a}*{self.b}+{self.c}"

    @property
    def product(self) -> int:
        return self.a * self.b

    @property
    def answer(self) -> int:
        return self.product + self.c


PROBLEMS = [CalculatorProblem(a, b, c) for a in range(2, 13) for b in range(2, 6) for c in range(1, 21)]


@dataclass(slots=True)
class Tally:
    """Counts of one rollout's tool calls."""

    calls: int = 0
    errors: int = 0


def evaluate(expression: str) -> str:
    """Return the value of `number operator number` as text; "error" for anything else, and for a value that is not an
    integer."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return ERROR
    left, operator, right = int(match[1]), match[2], int(match[3])
    if operator == "/":
        return str(left // right) if right and left % right == 0 else ERROR
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


class Calculator(Environment):
    """`What is a*b+c?` for a in 2..12, b in 2..5, c in 1..20: 880 problems."""

    name = "calculator"
    restoration = "replay"

    def __init__(self, heldout_fraction: float = 0.2) -> None:
        self._problems = split_problems(PROBLEMS, lambda problem: f"calculator/{problem.text}", heldout_fraction)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        schemas = self.tool_schemas()
        return TaskList(
            self._problems[split],
            lambda problem: task_row(
                question(problem), task_id=f"calculator/{problem.text}", tools=schemas, answer=problem.answer
            ),
        )

    async def seed_session(self, row: TaskRow) -> Tally:
        return Tally()

    @tool("Calculate with one operator.", expression="Two whole numbers with one of + - * / between them.")
    async def calculate(self, session: Tally, expression: str) -> str:
        session.calls += 1
        value = evaluate(str(expression)) if session.calls <= MAX_CALLS else ERROR
        session.errors += value == ERROR
        return value

    async def verify(self, session: Tally, row: TaskRow, response: dict[str, Any]) -> Verdict:
        right = closing_text(response) == answer_sentence(int(row["answer"]))
        metrics = {"tool_calls": float(session.calls), "tool_errors": float(session.errors)}
        return Verdict(reward=float(right), metrics=metrics)

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[Message]]:
        """`good_fraction` of them follow the right procedure, the rest one of `WRONG_PROCEDURES`."""
        rng = random.Random(seed)
        wrong = {name: share * (1 - good_fraction) / 0.75 for name, share in WRONG_PROCEDURES.items()}
        problems = self._problems[split]
        conversations: list[list[Message]] = []
        for procedure in deal({"right": good_fraction, **wrong}, count, rng):
            problem = rng.choice(problems)
            messages = [user(question(problem))]
            if procedure == "guess":
                messages.append(says(answer_sentence(rng.choice(PROBLEMS).answer)))
            else:
                messages += _used_tool("call_1", f"{problem.a}*{problem.b}")
                if procedure == "stop_after_product":
                    messages.append(says(answer_sentence(problem.product)))
                elif procedure == "finish_in_head":
                    messages.append(says(answer_sentence(problem.product + rng.randint(1, 20))))
                else:
                    messages += _used_tool("call_2", f"{problem.product}+{problem.c}")
                    messages.append(says(answer_sentence(problem.answer)))
            conversations.append(messages)
        return conversations


def question(problem: CalculatorProblem) -> str:
    return f"What is {problem.text}?"


def answer_sentence(answer: int) -> str:
    return f"The answer is {answer}."


def _used_tool(call_id: str, expression: str) -> Iterator[Message]:
    yield calls("calculate", call_id, expression=expression)
    yield returns(call_id, evaluate(expression))


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
        expressions = distinct(
            lambda rng: draw(operators, rng), str, problems, f"arithmetic_chain with {operators} operators"
        )
        super().__init__(expressions, heldout_fraction)

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
        shown_steps = steps if right else steps[:-1]
        value = "0"
        for number, step in enumerate(shown_steps, 1):
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
