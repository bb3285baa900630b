"""Single turn: short questions of general knowledge with short answers, whose form the prompt says.

Invariant: the reward is `RIGHT` when the reply names an accepted answer and no other answer of its family, plus `ENDED` when
the policy ended its turn within `max_tokens`. Naming several answers is wrong, so guessing in lists pays nothing; what is in
the question does not count either way.

    What is the capital of France? Answer with the name only.   ->   Paris                            1.0
                                                                     The capital of France is Paris.  1.0
                                                                     Rome, Paris or Berlin            0.2
                                                                     The capital of France, which is  0.0

`environment/exact` reports how often the reply is an answer and nothing else, as the prompt asks: form apart from knowledge.

The families of `OTHER_FAMILIES` ask for a sentence, an explanation, a greeting. They are meant for an evaluation set next to
training: what a policy could do before should not be lost. Their reward is 1 or 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments import short_facts
from roundhouse.environments.base import TaskRow, Verdict, closing_text
from roundhouse.environments.generated import GeneratedEnvironment, Message, says

RIGHT, ENDED = 0.8, 0.2
LARGEST_SUMMAND = 15
SENTENCE_WORDS = 5
"""The fewest words of a sentence."""

Fact = tuple[str, tuple[str, ...]]
"""A subject and what is right of it."""


@dataclass(frozen=True, slots=True)
class Question:
    """One task; `answers` are equally right."""

    family: str
    subject: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Questions of one form."""

    prompt: str
    """With `{}` for the subject."""
    facts: Callable[[], list[Fact]]


def table(text: str) -> Callable[[], list[Fact]]:
    """The facts of a table of `short_facts`."""

    def facts() -> list[Fact]:
        items = [item.strip().split(": ") for line in text.strip().splitlines() for item in line.split(";")]
        return [(subject, tuple(answers.split("|"))) for subject, answers in items]

    return facts


def _sums() -> list[Fact]:
    numbers = range(2, LARGEST_SUMMAND + 1)
    return [(f"{a}+{b}", (str(a + b),)) for a in numbers for b in numbers if a <= b]


def _words() -> list[Fact]:
    return [(word, (word,)) for word in short_facts.SUBJECTS.split()]


FAMILIES = {
    "capitals": Family("What is the capital of {}? Answer with the name only.", table(short_facts.CAPITALS)),
    "continents": Family("On which continent is {}? Answer with the name only.", table(short_facts.CONTINENTS)),
    "opposites": Family('What is the opposite of "{}"? Answer with one word.', table(short_facts.OPPOSITES)),
    "colours": Family("What colour is {}? Answer with one word.", table(short_facts.COLOURS)),
    "sums": Family("What is {}? Answer with the number only.", _sums),
    "units": Family("How many {}? Answer with the number only.", table(short_facts.UNITS)),
}
OTHER_FAMILIES = {
    "sentences": Family('Write one sentence with the word "{}".', _words),
    "explanations": Family('Explain what the word "{}" means.', _words),
    "greetings": Family(
        "Write a short greeting to {}.", lambda: [(name, (name.lower(),)) for name in short_facts.NAMES.split()]
    ),
}


class ShortQuestions(GeneratedEnvironment[Question]):
    """The questions of `families`."""

    name = "short_questions"
    restoration = "replay"

    def __init__(
        self, families: Sequence[str] = tuple(FAMILIES), max_tokens: int = 16, heldout_fraction: float = 0.33
    ) -> None:
        self._families = {name: (FAMILIES | OTHER_FAMILIES)[name] for name in families}
        self._max_tokens = max_tokens
        facts = {name: family.facts() for name, family in self._families.items()}
        self._known = {
            name: {answer.lower() for _, answers in found for answer in answers} for name, found in facts.items()
        }
        super().__init__(
            [Question(name, subject, answers) for name, found in facts.items() for subject, answers in found],
            heldout_fraction,
        )

    def key(self, problem: Question) -> str:
        return f"{problem.family}/{problem.subject}"

    def row(self, problem: Question) -> TaskRow:
        prompt = self._families[problem.family].prompt.format(problem.subject)
        row = self.task(problem, prompt, family=problem.family, subject=problem.subject, answers=list(problem.answers))
        row["responses_create_params"]["max_output_tokens"] = self._max_tokens
        return row

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        family, answers = row["family"], {answer.lower() for answer in row["answers"]}
        reply = (closing_text(response) or "").lower()
        if family in OTHER_FAMILIES:
            held = float(is_sentence(reply) and named(reply, answers) == answers)
            return Verdict(held, {family: held})
        others = (self._known[family] | set(numbers(reply))) - named(row["subject"].lower(), self._known[family])
        found = named(reply, answers | others - set(numbers(row["subject"])))
        right = float(bool(found) and found <= answers)
        parts = {"right": RIGHT * right, "ended": ENDED * (response.get("status") != "incomplete")}
        exact = float(reply.strip().removesuffix(".") in answers)
        return Verdict(sum(parts.values()), parts, {"right": right, "exact": exact, f"right_{family}": right})

    def demonstration(self, problem: Question, right: bool, rng: random.Random) -> Iterator[Message]:
        """The answer alone (with words around it where a sentence is asked for), or another one of the family."""
        wrong = sorted(self._known[problem.family] - {answer.lower() for answer in problem.answers})
        said = problem.answers[0] if right or not wrong else rng.choice(wrong)
        yield says(f"I would like to mention {said}." if problem.family in OTHER_FAMILIES else said)


def numbers(text: str) -> list[str]:
    """
    >>> numbers("7 + 10 is 1,017.")
    ['7', '10', '1,017']
    """
    return re.findall(r"\d(?:[\d,]*\d)?", text)


def named(text: str, answers: set[str]) -> set[str]:
    """Those of `answers` that a text has as words of their own. Of answers within each other the longest counts.

    >>> sorted(named("the capital of niger is niamey", {"niamey", "niger", "nigeria"}))
    ['niamey', 'niger']
    """
    if not answers:
        return set()
    longest_first = sorted(answers, key=len, reverse=True)
    return set(re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", text))


def is_sentence(reply: str) -> bool:
    return len(re.findall(r"[\w']+", reply)) >= SENTENCE_WORDS
