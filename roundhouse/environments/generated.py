"""The base of environments whose problems are generated: splits, rows and demonstrations from four small methods.

Invariants: problems are a pure function of the constructor's arguments; no two have the same key; train and held-out are dealt
by the digest of the key, so that every process agrees without a file; a right demonstration, its tool calls replayed on a real
session, earns reward 1.

    class Doubling(GeneratedEnvironment[int]):
        name = "doubling"

        def __init__(self, heldout_fraction: float = 0.2) -> None:
            super().__init__(range(100), heldout_fraction)

        def key(self, problem): return str(problem)
        def row(self, problem): return self.task(problem, f"Double {problem}.", answer=str(2 * problem))
        def demonstration(self, problem, right, rng): yield says(str(2 * problem if right else problem))

        async def verify(self, session, row, response):
            return Verdict(reward=float(closing_text(response) == row["answer"]))
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from roundhouse.environments.base import Environment, Split, TaskRow, task_row
from roundhouse.environments.conversations import Message, user
from roundhouse.environments.splits import TaskList, deal, split_problems
from roundhouse.errors import ConfigError

P = TypeVar("P")

REPEATS = 2000
"""Draws in a row that bring nothing unseen, after which a generator is held to be exhausted."""


class GeneratedEnvironment(Environment, Generic[P]):
    """An environment over a list of problems; see the module's docstring for an example."""

    def __init__(self, problems: Iterable[P], heldout_fraction: float) -> None:
        self.problems = split_problems(problems, self.task_id, heldout_fraction)

    @abstractmethod
    def key(self, problem: P) -> str:
        """The problem's name: equal exactly for equal problems."""

    @abstractmethod
    def row(self, problem: P) -> TaskRow:
        """The problem as a task row; `task` makes it."""

    @abstractmethod
    def demonstration(self, problem: P, right: bool, rng: random.Random) -> Iterator[Message]:
        """What an assistant says and does after the prompt: the solution, or a plausible mistake."""

    def task_id(self, problem: P) -> str:
        return f"{self.name}/{self.key(problem)}"

    def task(self, problem: P, prompt: str, **fields: Any) -> TaskRow:
        """A task row with one user message and all tools."""
        return task_row(prompt, task_id=self.task_id(problem), tools=self.tool_schemas(), **fields)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return TaskList(self.problems[split], self.row)

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[Message]]:
        """`good_fraction` of them are right, to the nearest whole."""
        rng = random.Random(seed)
        shown = []
        for kind in deal({"right": good_fraction, "wrong": 1 - good_fraction}, count, rng):
            problem = rng.choice(self.problems[split])
            prompt = self.row(problem)["responses_create_params"]["input"][0]["content"]
            shown.append([user(prompt), *self.demonstration(problem, kind == "right", rng)])
        return shown


def distinct(draw: Callable[[random.Random], P], key: Callable[[P], str], count: int, seed: str) -> list[P]:
    """`count` problems with different keys, drawn by a generator seeded with `seed`.

    Raises:
        ConfigError: the generator has fewer different problems than that.
    """
    rng = random.Random(seed)
    found: dict[str, P] = {}
    repeats = 0
    while len(found) < count:
        problem = draw(rng)
        name = key(problem)
        repeats = repeats + 1 if name in found else 0
        found[name] = problem
        if repeats == REPEATS:
            raise ConfigError(f"environment.problems is {count}, but {seed} has only about {len(found)}. Lower it.")
    return list(found.values())
