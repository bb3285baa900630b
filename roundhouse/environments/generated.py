"""The base of environments with generated problems: splits, rows and demonstrations from four small methods.

Invariants: problems are a pure function of the constructor's arguments; no two have the same key; train and held-out
are split by the digest of the key, so every process agrees without a file; a right demonstration, with its tool calls
repeated on a real session, earns reward 1.

    class Doubling(GeneratedEnvironment[int]):
        name = "doubling"

        def __init__(self, heldout_fraction: float = 0.2) -> None:
            super().__init__(range(100), heldout_fraction)

        def key(self, problem): return str(problem)
        def row(self, problem): return self.task(problem, f"Double {problem}.", answer=str(2 * problem))
        def demonstration(self, problem, right, rng): yield says(str(2 * problem if right else problem))

        async def verify(self, session, row, response):
            return Verdict(reward=float(closing_text(response) == row["answer"]))

Train and held-out together are all problems, without overlap. The order is that of the digests, unrelated to the
natural order, so any range of tasks is a fair sample.

Also parts of conversations: chat messages of demonstrations, and readers for verifiers. An answer counts only if the
rollout ended with it; text next to a tool call is not a final answer.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from roundhouse.environments.base import Environment, Split, TaskList, TaskRow, task_row
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
        """Return the assistant's messages after the prompt: the solution, or a plausible mistake."""

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
        conversations = []
        for kind in deal({"right": good_fraction, "wrong": 1 - good_fraction}, count, rng):
            problem = rng.choice(self.problems[split])
            prompt = self.row(problem)["responses_create_params"]["input"][0]["content"]
            conversations.append([user(prompt), *self.demonstration(problem, kind == "right", rng)])
        return conversations


def distinct(draw: Callable[[random.Random], P], key: Callable[[P], str], count: int, seed: str) -> list[P]:
    """`count` problems with different keys, drawn by a generator seeded with `seed`.

    Raises:
        ConfigError: the generator has fewer different problems than that.
    """
    rng = random.Random(seed)
    problems_by_key: dict[str, P] = {}
    repeats = 0
    while len(problems_by_key) < count:
        problem = draw(rng)
        name = key(problem)
        repeats = repeats + 1 if name in problems_by_key else 0
        problems_by_key[name] = problem
        if repeats == REPEATS:
            raise ConfigError(
                f"environment.problems is {count}, but {seed} has only about {len(problems_by_key)}. Lower it."
            )
    return list(problems_by_key.values())


def position(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone, evenly spread over names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def split_problems(problems: Iterable[P], name: Callable[[P], str], heldout_fraction: float) -> dict[Split, list[P]]:
    """Deal `problems` into train and held-out by the digests of their names.

    Raises:
        ConfigError: nothing is left to train on.
    """
    placed = sorted((position(name(problem)), index, problem) for index, problem in enumerate(problems))
    heldout = [problem for place, _, problem in placed if place < heldout_fraction]
    train = [problem for place, _, problem in placed if place >= heldout_fraction]
    if not train:
        raise ConfigError(
            f"environment.heldout_fraction is {heldout_fraction}: no task is left to train on. Lower it (0.2 is usual)."
        )
    return {"train": train, "heldout": heldout}


def deal(shares: dict[str, float], count: int, rng: random.Random) -> list[str]:
    """Return `count` names in random order, each by its share (rounded).

    >>> sorted(deal({"a": 0.25, "b": 0.75}, 4, random.Random(0)))
    ['a', 'b', 'b', 'b']
    """
    total = sum(shares.values())
    names: list[str] = []
    reached = 0.0
    for name, share in shares.items():
        reached += share / total
        names += [name] * (round(reached * count) - len(names))
    rng.shuffle(names)
    return names


Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    """The assistant answers in words."""
    return {"role": "assistant", "content": text}


def calls(name: str, call_id: str, **arguments: Any) -> Message:
    """The assistant calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def returns(call_id: str, text: str) -> Message:
    """The tool answers the call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}
