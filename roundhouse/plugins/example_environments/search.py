"""Two searches by tool calls: through a table (`Lookup`), and for a hidden number (`GuessNumber`).

Invariant: the policy sees the hidden table or number through the tool's answers alone.

    Start at bo. Take 2 hops. Where are you?  ->  get(bo) = ka  ->  get(ka) = mi  ->  mi
    Guess my number from 1 to 7.  ->  guess(4) = higher  ->  guess(6) = lower  ->  guess(5) = correct  ->  Done.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import (
    Environment,
    Rewarded,
    Split,
    TaskList,
    TaskRow,
    Verdict,
    closing_text,
    task_row,
    tool,
)
from roundhouse.environments.generated import (
    GeneratedEnvironment,
    Message,
    calls,
    deal,
    distinct,
    position,
    returns,
    says,
    user,
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
    """Walks of 1..`hops` hops in tables of `entries` words that only a tool can see.

    Invariant: the reward is 1 exactly if the rollout ends with the word at the requested number of hops from the start,
    else 0.

    The table is one ring over all its words, so no walk ends early; words off the path are the distractors. The tool
    answers at most two calls more than the walk needs. A wrong demonstration stops one hop early.
    """

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
            problem, prompt, table=dict(zip(ring, (*ring[1:], ring[0]), strict=True)), hops=hops, answer=ring[hops]
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


GAMES_PER_NUMBER = 20
"""Tasks of a split for each hidden number, so that a batch or an evaluation does not run out of them."""
CLOSING = "Done."


@dataclass(slots=True)
class Game:
    """The remaining hidden numbers, the first of which is searched, and the earlier guesses."""

    hidden: list[int]
    guesses: int = 0
    """In the game at hand."""
    all_guesses: int = 0
    found: int = 0


class GuessNumber(Environment):
    """`games` hidden numbers in 1..`upper` in sequence, with `guesses` guesses for each.

    Invariant: the reward is 1 exactly if one of the allowed guesses hit the number, by the tool's answer, else 0. With
    `games` above 1 it is the share of found numbers, and the last turn of a game has its reward.

    The search must be discovered, because the demonstrations need not show it. With `upper` = 7 and 3 guesses, halving
    always finds the number; guessing at random within the remaining range finds 68 %, guessing blindly without
    repeating 43 %. With `policy.good_fraction` 0 the demonstrations show the last two, half and half, and reward alone
    leads to halving. 10 games of 3 guesses are 20 to 30 turns.

    Train and held-out differ only in their IDs: both draw from the same `upper` hidden numbers, and the prompt is the
    same for all. A held-out reward therefore measures the search itself.
    """

    name = "guess_number"
    restoration = "replay"

    def __init__(self, upper: int = 7, guesses: int = 3, games: int = 1) -> None:
        self.upper = upper
        self.guesses = guesses
        self.games = games

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        games = [(hidden, game) for hidden in range(1, self.upper + 1) for game in range(GAMES_PER_NUMBER)]
        schemas = self.tool_schemas()

        def row(game: tuple[int, int]) -> TaskRow:
            task_id = f"guess_number/{split}/{game[0]}-{game[1]}"
            if self.games == 1:
                return task_row(self.question(), task_id=task_id, tools=schemas, hidden=game[0])
            rng = random.Random(task_id)
            hidden = [game[0], *(rng.randint(1, self.upper) for _ in range(self.games - 1))]
            return task_row(self.question(), task_id=task_id, tools=schemas, hidden=hidden)

        return TaskList(sorted(games, key=lambda game: position(f"{split}/{game}")), row)

    def question(self) -> str:
        if self.games == 1:
            return f"Guess my number from 1 to {self.upper}."
        return f"Guess my {self.games} numbers from 1 to {self.upper}, one after the other."

    async def seed_session(self, row: TaskRow) -> Game:
        hidden = row["hidden"]
        return Game([int(number) for number in hidden] if isinstance(hidden, list) else [int(hidden)])

    @tool("Guess the hidden number.", number="The guess.")
    async def guess(self, session: Game, number: int) -> str | Rewarded:
        if not session.hidden:
            return "no guesses left"
        answer = compare(number, session.hidden[0])
        hit, over = answer == "correct", session.guesses + 1 == self.guesses
        session.guesses += 1
        session.all_guesses += 1
        if self.games == 1:  # a hit may be followed by other guesses, which take nothing back
            session.found, session.hidden = session.found or hit, [] if over else session.hidden
            return answer
        if not hit and not over:
            return answer
        session.hidden, session.guesses, session.found = session.hidden[1:], 0, session.found + hit
        return Rewarded(answer, hit / self.games)

    async def verify(self, session: Game, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(session.found / self.games, metrics={"guesses": float(session.all_guesses)})

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[Message]]:
        """`good_fraction` of them halve the range. Of the rest, half guess at random within it, half blindly."""
        rng = random.Random(seed)
        other = (1 - good_fraction) / 2
        procedures = deal({"halving": good_fraction, "in_range": other, "blind": other}, count, rng)
        return [list(self._demonstration(procedure, rng)) for procedure in procedures]

    def _demonstration(self, procedure: str, rng: random.Random) -> Iterator[Message]:
        yield user(self.question())
        call = 0
        for _ in range(self.games):
            hidden = rng.randint(1, self.upper)
            low, high = 1, self.upper
            blind = rng.sample(range(1, self.upper + 1), self.upper)
            for turn in range(min(self.guesses, self.upper)):
                tried = {"halving": (low + high) // 2, "in_range": rng.randint(low, high), "blind": blind[turn]}
                number, call = tried[procedure], call + 1
                answer = compare(number, hidden)
                yield calls("guess", f"call_{call}", number=number)
                yield returns(f"call_{call}", answer)
                if answer == "correct":
                    break
                if procedure != "blind":
                    low, high = (number + 1, high) if answer == "higher" else (low, number - 1)
        yield says(CLOSING)


def compare(number: Any, hidden: int) -> str:
    """The tool's answer to a guess: correct, lower or higher; "error" for anything but a whole number."""
    try:
        guess = int(str(number))
    except ValueError:
        return "error"
    if guess == hidden:
        return "correct"
    return "higher" if hidden > guess else "lower"
