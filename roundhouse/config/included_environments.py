"""The sections of the environments of the core, and the bases of those that come with Roundhouse."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roundhouse.config.environments import SplitEnvironment

Problems = Annotated[int, Field(ge=2, le=100_000)]


class IncludedEnvironment(SplitEnvironment):
    """Base of the environments that come with Roundhouse."""

    is_included: ClassVar[bool] = True


class CalculatorEnvironment(IncludedEnvironment):
    """Two-step arithmetic `a*b+c` with a calculator tool for one operator per call."""

    kind: Literal["calculator"] = "calculator"


class SortEnvironment(IncludedEnvironment):
    """Single turn: sort the given digits."""

    kind: Literal["sort"] = "sort"
    digits: Annotated[int, Field(ge=2, le=9)] = 6
    """Number of digits of a problem."""


class GeneratedProblems(IncludedEnvironment):
    """Common part of environments with a generator."""

    problems: Problems = 4000
    """Number of generated problems, over both splits."""


class ArithmeticChainEnvironment(GeneratedProblems):
    """Nested arithmetic with a calculator tool for one operator per call."""

    kind: Literal["arithmetic_chain"]
    operators: Annotated[int, Field(ge=2, le=12)] = 3
    """Operators of an expression, equal to the number of calculator calls."""


class CountdownEnvironment(GeneratedProblems):
    """Single turn: reach a target by an expression over given numbers."""

    kind: Literal["countdown"]
    numbers: Annotated[int, Field(ge=2, le=6)] = 3
    """Number of given numbers."""
    largest: Annotated[int, Field(ge=4, le=99)] = 12
    """Range of the numbers: 1..largest."""


class SudokuEnvironment(GeneratedProblems):
    """Single turn: fill in a 4x4 sudoku."""

    kind: Literal["sudoku"]
    blanks: Annotated[int, Field(ge=1, le=11)] = 5
    """Empty cells of a grid."""


class InstructionConstraintsEnvironment(GeneratedProblems):
    """Single turn: write words that satisfy checkable constraints on count, content, order and form."""

    kind: Literal["instruction_constraints"]
    constraints: Annotated[int, Field(ge=1, le=6)] = 3
    """Maximum number of constraints per prompt."""
