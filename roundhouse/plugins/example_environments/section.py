"""The sections of the example environments."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from roundhouse.config.environments import EnvironmentSection
from roundhouse.config.included_environments import GeneratedProblems, IncludedEnvironment, Problems
from roundhouse.config.sandboxes import LocalSandbox, SandboxConfig
from roundhouse.config.section import Fraction, PositiveInt, ProperFraction


class GuessNumberEnvironment(EnvironmentSection):
    """Find a hidden number with a tool that answers higher or lower. The policy must discover the search."""

    is_included: ClassVar[bool] = True
    kind: Literal["guess_number"] = "guess_number"
    upper: Annotated[int, Field(ge=3, le=64)] = 7
    """The hidden number is in 1..upper."""
    guesses: PositiveInt = 3
    """Guesses allowed in a game."""
    games: Annotated[int, Field(ge=1, le=64)] = 1
    """Consecutive games in one rollout; each is rewarded at its last turn."""


class LookupEnvironment(GeneratedProblems):
    """Follow keys through a table that is visible only to a tool."""

    kind: Literal["lookup"]
    hops: PositiveInt = 3
    """Maximum length of the path."""
    entries: Annotated[int, Field(ge=4, le=60)] = 12
    """Words in a table; words off the path are distractors."""

    @model_validator(mode="after")
    def _fits(self) -> LookupEnvironment:
        if self.hops >= self.entries:
            raise ValueError(f"hops ({self.hops}) must be below entries ({self.entries}): the walk would come round.")
        return self


class WarehouseEnvironment(GeneratedProblems):
    """Inspect shelves, move goods and ship them. The final state is judged."""

    kind: Literal["warehouse"]
    most: Annotated[int, Field(ge=2, le=99)] = 9
    """Maximum quantity of one good on a shelf."""
    orders: Annotated[int, Field(ge=1, le=20)] = 1
    """Orders of a rollout: each shipment but the last brings the next one, with other stock on the shelves."""


class SqlWorldEnvironment(GeneratedProblems):
    """Questions and changes over SQLite tables: result sets and final tables are compared (Linux only)."""

    kind: Literal["sql_world"]
    problems: Problems = 2000
    worlds: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Number of different table contents."""
    changes: Fraction = 0.3
    """Share of assignments that change data instead of reading it."""


class CodeEnvironment(GeneratedProblems):
    """Write a Python function; hidden tests judge it in a locked process (Linux only)."""

    kind: Literal["code"]
    problems: Problems = 1000
    steps: Annotated[int, Field(ge=1, le=6)] = 3
    """Maximum number of steps of a function."""
    concurrency: PositiveInt = 2
    """Maximum number of processes that run answers at once, per process with the environment. The number of cores is an upper
    limit."""


class TerminalEnvironment(GeneratedProblems):
    """Tasks in a file tree, solved with commands in a sandbox. The final tree is judged."""

    kind: Literal["terminal"]
    problems: Problems = 1000
    files: Annotated[int, Field(ge=4, le=40)] = 8
    """Files of a tree."""
    sandbox: SandboxConfig = LocalSandbox()
    """Sandbox of the commands."""


class BugFixEnvironment(GeneratedProblems):
    """Repair a small Python repository in a sandbox. Hidden tests judge the resulting sources in a fresh sandbox."""

    kind: Literal["bug_fix"]
    problems: Problems = 500
    functions: Annotated[int, Field(ge=2, le=8)] = 4
    """Functions of a repository, one of them with a bug."""
    sandbox: SandboxConfig = LocalSandbox()
    """Sandbox of the commands. It needs python3."""


QuestionFamily = Literal[
    "capitals", "continents", "opposites", "colours", "sums", "units", "sentences", "explanations", "greetings"
]


class ShortQuestionsEnvironment(IncludedEnvironment):
    """Single turn: short general-knowledge questions, for a pretrained language model."""

    kind: Literal["short_questions"]
    families: Annotated[tuple[QuestionFamily, ...], Field(min_length=1)] = (
        *("capitals", "continents", "opposites", "colours", "sums", "units"),
    )
    """Kinds of questions. sentences, explanations and greetings require more than an answer, to evaluate other
    abilities."""
    max_tokens: PositiveInt = 16
    """Token limit of a reply. A reply that reaches it loses part of the reward."""
    heldout_fraction: ProperFraction = 0.33


class FrozenLakeEnvironment(GeneratedProblems):
    """A game of several turns in the Gymnasium protocol: cross a frozen lake without falling in."""

    kind: Literal["frozen_lake"]
    problems: Problems = 2000
    size: Annotated[int, Field(ge=3, le=12)] = 4
    """Rows and columns."""
    holes: Annotated[int, Field(ge=0)] = 4
    """Holes in a lake."""
    steps: Annotated[int, Field(ge=3)] = 10
    """Moves of an episode; rollout.max_turns should be at least as large."""

    @model_validator(mode="after")
    def _fits(self) -> FrozenLakeEnvironment:
        if self.holes > self.size * self.size // 2:
            raise ValueError(f"holes ({self.holes}) fill more than half of a lake of size {self.size}. Lower them.")
        return self
