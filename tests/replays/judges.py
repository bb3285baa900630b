"""Environments with another verifier or world than at collection."""

from __future__ import annotations

from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, tool
from roundhouse.environments.calculator import Calculator
from roundhouse.environments.search import Lookup, Reader


class RefusesSevens(Calculator):
    """No reward for an answer with the digit 7."""

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        verdict = await super().verify(session, row, response)
        return Verdict(0.0, {}) if "7" in str(response["output"][-1]) else verdict


class Raises(Calculator):
    """A verifier with a defect."""

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        raise ZeroDivisionError("defect")


class OtherAnswers(Lookup):
    """A tool that answers in capitals."""

    @tool("Where a word leads.", word="A word.")
    async def get(self, session: Reader, word: str) -> str:
        return (await Lookup.get(self, session, word)).upper()


class CannotBeReplayed(Lookup):
    """Nothing is known of how its calls behave when they are made again."""

    restoration = "none"
