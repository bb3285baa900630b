"""Worlds of the tests of branches, without imports that an environment's process does not need."""

import json
import time
from dataclasses import astuple
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, tool
from roundhouse.plugins.example_environments.search import Game, GuessNumber


class Saved(GuessNumber):
    """A game that can be written down, and is not played again to be restored."""

    restoration = "snapshot"

    async def snapshot_session(self, session: Game) -> Any:
        return astuple(session)

    async def restore_session(self, row: TaskRow, snapshot: Any) -> Game:
        return Game(*snapshot)


class LastGuess(GuessNumber):
    """Rewards the last guess by its size: no end of a branch is settled before."""

    async def verify(self, session: Game, row: TaskRow, response: dict[str, Any]) -> Verdict:
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        return Verdict(json.loads(calls[-1]["arguments"])["number"] / 7)


class Drifting(GuessNumber):
    """Answers differently each time, although it declares that its calls can be repeated."""

    @tool("Guess the hidden number.", number="The guess.")
    async def guess(self, session: Game, number: int) -> str:
        return f"{await GuessNumber.guess(self, session, number)} ({time.monotonic_ns()})"
