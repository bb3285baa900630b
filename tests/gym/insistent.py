"""A counter that asks for more. Processes of user code import this module alone."""

from __future__ import annotations

from typing import Any

from roundhouse.environments.base import Split, TaskRow, final_text
from tests.gym.counter import Account, Counter, counter_row


class Insistent(Counter):
    """Answers a reply without a call until the total is 3."""

    name = "insistent"
    restoration = "replay"

    def tasks(self, split: Split) -> list[TaskRow]:
        return [counter_row(verdict="right")]

    async def follow_up(self, session: Account, row: TaskRow, response: dict[str, Any]) -> str | None:
        if row.get("verdict") == "no follow-up":
            raise ValueError("nothing to ask")
        return None if session.total >= 3 else f"{final_text(response)} But it is {session.total}."
