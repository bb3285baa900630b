"""Environments with another world than at collection."""

from __future__ import annotations

from roundhouse.environments.base import tool
from roundhouse.plugins.example_environments.search import Lookup, Reader


class OtherAnswers(Lookup):
    """A tool that answers in capitals."""

    @tool("Where a word leads.", word="A word.")
    async def get(self, session: Reader, word: str) -> str:
        return (await Lookup.get(self, session, word)).upper()


class CannotBeReplayed(Lookup):
    """Nothing is known of how its calls behave when they are made again."""

    restoration = "none"
