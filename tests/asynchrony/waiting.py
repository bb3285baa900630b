"""An environment in which some rollouts take as long as something else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict
from roundhouse.environments.calculator import Calculator

LIMIT_SECONDS = 120.0


class Waiting(Calculator):
    """The calculator's tasks; rollouts of one of them end when a file is there."""

    name = "waiting"
    restoration = "none"

    def __init__(self, task: str, file: str) -> None:
        super().__init__()
        self._task = task
        self._file = Path(file)

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        if row["task_id"] == self._task:
            await asyncio.to_thread(self._wait)
        return await super().verify(session, row, response)

    def _wait(self) -> None:
        ends = time.monotonic() + LIMIT_SECONDS
        while not self._file.exists():
            if time.monotonic() > ends:
                raise TimeoutError(f"{self._file} is not there after {LIMIT_SECONDS:g} s")
            time.sleep(0.05)
