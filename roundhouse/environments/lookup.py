"""Follow keys through a table that only a tool can see.

Invariant: the reward is 1 exactly when the rollout ends with the word that lies the asked number of hops from the start,
else 0.

    Start at bo. Take 2 hops. Where are you?  ->  get(bo) = ka  ->  get(ka) = mi  ->  mi

The table is one ring over all its words, so that no walk ends early; words that are not on the way are the distractors. The
tool answers at most two calls more than the walk needs. A wrong demonstration stops one hop early.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, tool
from roundhouse.environments.generated import (
    GeneratedEnvironment,
    Message,
    calls,
    closing_text,
    distinct,
    returns,
    says,
)

WORDS = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
SPARE_CALLS = 2


@dataclass(frozen=True, slots=True)
class LookupWalk:
    """`ring[i]` leads to `ring[i + 1]`; the walk begins at `ring[0]`."""

    ring: tuple[str, ...]
    hops: int


@dataclass(slots=True)
class Reader:
    """One rollout's table and how often it was read."""

    table: dict[str, str]
    calls_left: int
    misses: int = 0


class Lookup(GeneratedEnvironment[LookupWalk]):
    """Walks of 1..`hops` hops in tables of `entries` words."""

    name = "lookup"
    restoration = "replay"

    def __init__(self, hops: int = 3, entries: int = 12, problems: int = 4000, heldout_fraction: float = 0.2) -> None:
        def draw(rng: random.Random) -> LookupWalk:
            return LookupWalk(tuple(rng.sample(WORDS, entries)), rng.randint(1, hops))

        super().__init__(distinct(draw, self.key, problems, f"lookup with {entries} entries"), heldout_fraction)

    def key(self, problem: LookupWalk) -> str:
        return f"{'-'.join(problem.ring)}/{problem.hops}"

    def row(self, problem: LookupWalk) -> TaskRow:
        ring, hops = problem.ring, problem.hops
        prompt = f"Start at {ring[0]}. Take {hops} {'hop' if hops == 1 else 'hops'}. Where are you?"
        return self.task(
            problem, prompt, table=dict(zip(ring, _turned(ring), strict=True)), hops=hops, answer=ring[hops]
        )

    async def seed_session(self, row: TaskRow) -> Reader:
        return Reader(table=row["table"], calls_left=int(row["hops"]) + SPARE_CALLS)

    @tool("Where a word leads.", word="A word.")
    async def get(self, session: Reader, word: str) -> str:
        if session.calls_left <= 0:
            return "no calls left"
        session.calls_left -= 1
        session.misses += word not in session.table
        return session.table.get(word, "not found")

    async def verify(self, session: Reader, row: TaskRow, response: dict[str, Any]) -> Verdict:
        used = int(row["hops"]) + SPARE_CALLS - session.calls_left
        metrics = {"tool_calls": float(used), "misses": float(session.misses)}
        return Verdict(reward=float(closing_text(response) == row["answer"]), metrics=metrics)

    def demonstration(self, problem: LookupWalk, right: bool, rng: random.Random) -> Iterator[Message]:
        hops = problem.hops if right else problem.hops - 1
        for hop in range(hops):
            yield calls("get", f"call_{hop + 1}", word=problem.ring[hop])
            yield returns(f"call_{hop + 1}", problem.ring[hop + 1])
        yield says(problem.ring[hops])


def _turned(ring: tuple[str, ...]) -> tuple[str, ...]:
    return (*ring[1:], ring[0])
