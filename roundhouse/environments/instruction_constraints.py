"""Single turn: write a few words that satisfy checkable constraints.

Invariant: the reward is 1 exactly when the reply satisfies every constraint of the prompt; otherwise it is the share that is
satisfied, but at most one half, so that leaving one out never pays. `reward_components` has a part for each constraint and
`all`. Each constraint is checked by a function of the reply's text alone.

    Write words. Use 4 words. Include "moon". Sort the words.   ->   cat moon sky tree   1.0
                                                                     moon cat tree sky   0.33 (not sorted)

Constraints are drawn so that they can hold together, and a reference reply is made with them. A wrong demonstration breaks one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.generated import GeneratedEnvironment, Message, closing_text, distinct, says

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
"""A kind and its value, as it stands in the row."""

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
    """Constraints that `words` satisfies, written as `reply` says."""

    constraints: tuple[Constraint, ...]
    words: tuple[str, ...]

    @property
    def reply(self) -> str:
        return written(self.words, dict(self.constraints))


class InstructionConstraints(GeneratedEnvironment[Brief]):
    """Briefs of 1..`constraints` constraints."""

    name = "instruction_constraints"
    restoration = "replay"

    def __init__(self, constraints: int = 3, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        made = distinct(lambda rng: draw(constraints, rng), self.key, problems, f"briefs of {constraints} constraints")
        super().__init__(made, heldout_fraction)

    def key(self, problem: Brief) -> str:
        return " ".join(TEXTS[kind].format(value) for kind, value in problem.constraints)

    def row(self, problem: Brief) -> TaskRow:
        constraints = [list(constraint) for constraint in problem.constraints]
        return self.task(problem, f"Write words. {self.key(problem)}", constraints=constraints)

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        held = satisfied(closing_text(response) or "", [(kind, value) for kind, value in row["constraints"]])
        parts = {kind: PARTS * kept / len(held) for kind, kept in held.items()}
        parts["all"] = ALL * all(held.values())
        return Verdict(sum(parts.values()), parts, {"satisfied": sum(held.values()) / len(held)})

    def demonstration(self, problem: Brief, right: bool, rng: random.Random) -> Iterator[Message]:
        reply = problem.reply
        while not right and all(satisfied(reply, problem.constraints).values()):
            words = rng.sample(WORDS, max(2, len(problem.words) + rng.randint(-1, 1)))
            reply = written(tuple(words), dict(rng.sample(problem.constraints, len(problem.constraints) - 1)))
        yield says(reply)


def satisfied(reply: str, constraints: Any) -> dict[str, bool]:
    """Which constraints a reply satisfies, by kind."""
    value = dict(constraints)
    words = _json_words(reply, value["json"]) if "json" in value else None
    if words is None:
        words = reply.lower().replace(",", " ").split()
    return {kind: CHECKS[kind](reply, words, wanted) for kind, wanted in constraints}


def draw(constraints: int, rng: random.Random) -> Brief:
    """Words, and constraints that hold for them. JSON keeps its own punctuation and case."""
    words = tuple(rng.sample(WORDS, rng.randint(2, 5)))
    kinds = rng.sample(sorted(TEXTS), rng.randint(1, constraints))
    if "json" in kinds:
        kinds = [kind for kind in kinds if kind not in ("comma", "upper")]
    if "order" in kinds:
        words = tuple(sorted(words))
    unused = [letter for letter in "abcdefilmnorstw" if not any(letter in word for word in words)]
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
    """The words of a JSON object under its only key, in lower case; None when the reply is nothing of the kind."""
    try:
        told = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or list(told) != [key] or not isinstance(told[key], list):
        return None
    return [word.lower() for word in told[key]] if all(isinstance(word, str) for word in told[key]) else None
