"""An environment that cannot judge some of its tasks."""

from __future__ import annotations

from typing import Any

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.calculator import Calculator
from roundhouse.errors import DataError


class Refusing(Calculator):
    """The calculator's tasks; rollouts of the named tasks fail permanently."""

    name = "refusing"
    restoration = "none"

    def __init__(self, refused: list[str]) -> None:
        super().__init__()
        self._refused = frozenset(refused)

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        if row["task_id"] in self._refused:
            raise DataError(f"{row['task_id']} has no answer to hold it against.")
        return await super().verify(session, row, response)
