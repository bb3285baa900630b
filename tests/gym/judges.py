"""Environments with another verifier than at collection."""

from __future__ import annotations

from typing import Any

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.calculator import Calculator


class RefusesSevens(Calculator):
    """No reward for an answer with the digit 7."""

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        verdict = await super().verify(session, row, response)
        return Verdict(0.0, {}) if "7" in str(response["output"][-1]) else verdict


class Raises(Calculator):
    """A verifier with a defect."""

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        raise ZeroDivisionError("defect")
