"""Write a Python function; hidden tests judge it in a locked process.

Invariant: the reward is 1 exactly if the reply's function returns the reference's value, with the same type, for every
hidden input. It is the sum of its components: `runs` (0.1: it defines f, within the limits), `passed` (0.4 times the
share of passed hidden tests) and `all` (0.5, if all pass). Expected values are in the row, which neither the policy nor
the process with its code sees; the policy sees only the two examples of the tool `check`.

    Write f(xs) for a list of numbers: keep those above 3, then add 2 to each, then return the sum.
      ->  check(code="def f(xs): …") = f([4, 1, 6]) = 10, expected 14   ->   def f(xs): …

`sandbox` describes the locked process. A wrong demonstration omits one step that matters.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, closing_text, tool
from roundhouse.environments.generated import GeneratedEnvironment, Message, calls, distinct, returns, says
from roundhouse.environments.sandbox import CodeFailed, LockedPython, canonical

RUNS, PASSED, ALL = 0.1, 0.4, 0.5
TESTS, EXAMPLES = 12, 2
_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)

STEPS = {
    "keep those above {n}": "xs = [x for x in xs if x > {n}]",
    "drop those divisible by {n}": "xs = [x for x in xs if x % {n}]",
    "add {n} to each": "xs = [x + {n} for x in xs]",
    "multiply each by {n}": "xs = [x * {n} for x in xs]",
    "keep the first {n}": "xs = xs[:{n}]",
    "sort them": "xs = sorted(xs)",
    "reverse the order": "xs = xs[::-1]",
    "remove repeats": "xs = list(dict.fromkeys(xs))",
}
ENDS = {
    "return the list": "return xs",
    "return the sum": "return sum(xs)",
    "return how many there are": "return len(xs)",
    "return the largest, or 0 if there is none": "return max(xs, default=0)",
}


@dataclass(frozen=True, slots=True)
class Exercise:
    """Steps in words and as lines of code; the last one returns."""

    words: tuple[str, ...]
    lines: tuple[str, ...]

    def source(self, without: int | None = None) -> str:
        lines = [line for number, line in enumerate(self.lines) if number != without]
        return "def f(xs):\n" + "\n".join(f"    {line}" for line in lines)


class Code(GeneratedEnvironment[Exercise]):
    """Functions of 1..`steps` steps and a result; at most `concurrency` processes at once."""

    name = "code"
    restoration = "snapshot"
    """No tool changes the session: the answers of `check` are on record, so the code is not run again."""

    def __init__(
        self, steps: int = 3, concurrency: int = 2, problems: int = 1000, heldout_fraction: float = 0.2
    ) -> None:
        self._sandbox = LockedPython(concurrency)
        exercises = distinct(lambda rng: draw(steps, rng), self.key, problems, f"code with {steps} steps")
        super().__init__(exercises, heldout_fraction)

    def key(self, problem: Exercise) -> str:
        return ", then ".join(problem.words)

    def row(self, problem: Exercise) -> TaskRow:
        prompt = f"Write f(xs) for a list of numbers: {self.key(problem)}."
        arguments = inputs(self.key(problem))
        tests = [[xs, value] for xs, value in zip(arguments, values(problem.source(), arguments), strict=True)]
        return self.task(problem, prompt, tests=tests)

    async def seed_session(self, row: TaskRow) -> list[Any]:
        return list(row["tests"][:EXAMPLES])

    @tool("Run a function f on two examples.", code="Python.")
    async def check(self, session: list[Any], code: str) -> str:
        try:
            results = await self._sandbox.call(code, "f", [[xs] for xs, _ in session])
        except CodeFailed as failure:
            return f"error: {failure}"
        return compared(session, results)

    async def verify(self, session: list[Any], row: TaskRow, response: dict[str, Any]) -> Verdict:
        tests = row["tests"]
        try:
            results = await self._sandbox.call(code_in(closing_text(response) or ""), "f", [[xs] for xs, _ in tests])
        except CodeFailed:
            return Verdict(0.0, {"runs": 0.0, "passed": 0.0, "all": 0.0})
        share = sum(value == canonical(expected) for value, (_, expected) in zip(results, tests, strict=True)) / len(
            tests
        )
        parts = {"runs": RUNS, "passed": PASSED * share, "all": ALL * (share == 1)}
        return Verdict(sum(parts.values()), parts)

    def demonstration(self, problem: Exercise, right: bool, rng: random.Random) -> Iterator[Message]:
        source = problem.source(without=None if right else rng.randrange(len(problem.lines) - 1))
        examples = self.row(problem)["tests"][:EXAMPLES]
        results = values(source, [xs for xs, _ in examples])
        yield calls("check", "call_1", code=source)
        yield returns("call_1", compared(examples, [canonical(value) for value in results]))
        yield says(source)


def draw(steps: int, rng: random.Random) -> Exercise:
    """An exercise in which leaving out any step changes the result of some hidden test."""
    while True:
        pairs = [*rng.choices(sorted(STEPS.items()), k=rng.randint(1, steps)), rng.choice(sorted(ENDS.items()))]
        numbers = [rng.randint(2, 5) for _ in pairs]
        exercise = Exercise(
            tuple(words.format(n=n) for (words, _), n in zip(pairs, numbers, strict=True)),
            tuple(line.format(n=n) for (_, line), n in zip(pairs, numbers, strict=True)),
        )
        arguments = inputs(", then ".join(exercise.words))
        expected = values(exercise.source(), arguments)
        if all(values(exercise.source(without), arguments) != expected for without in range(len(pairs) - 1)):
            return exercise


def inputs(name: str) -> list[list[int]]:
    """The hidden inputs of the exercise of that name: lists of 0 to 8 numbers with repeats; the two examples are not short."""
    rng = random.Random(name)
    sizes = [5, 6, 0, 1] + [rng.randint(2, 8) for _ in range(TESTS - 4)]
    return [[rng.randint(-5, 12) for _ in range(size)] for size in sizes]


def values(source: str, given: Sequence[list[int]]) -> list[Any]:
    """Return the values of a trusted source. Never called with text of a policy or a row."""
    names: dict[str, Any] = {}
    exec(source, names)
    return [names["f"](list(xs)) for xs in given]


def code_in(text: str) -> str:
    """The first fenced block of a reply, or all of it."""
    fenced = _FENCED.search(text)
    return fenced[1] if fenced else text


def compared(tests: Sequence[Any], found: Sequence[str | None]) -> str:
    """A line a test, for the policy."""
    lines = [
        f"f({xs}) = {value or 'error'}, expected {canonical(expected)}"
        for (xs, expected), value in zip(tests, found, strict=True)
    ]
    return "\n".join(lines)
