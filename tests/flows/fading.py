"""An environment with a reward that collapses on cue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundhouse.environments.base import Split, TaskRow, Verdict
from roundhouse.environments.calculator import Calculator


def never(task: TaskRow, items: list[dict[str, Any]]) -> bool:
    """An audit that confirms no reward."""
    return False


class Fading(Calculator):
    """The calculator's tasks, judged by how many were judged before, in whichever process.

    Training is worth 1 for `good` rollouts and 0.1 from then on; held-out tasks are worth 0 for `poor` rollouts and 1 from then
    on.
    """

    name = "fading"
    restoration = "none"

    def __init__(self, directory: str, good: int, poor: int) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._good, self._poor = good, poor
        self._heldout = {row["task_id"] for row in self.tasks("heldout")}

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        split = self._split(row)
        number = self._count(split)
        if split == "heldout":
            return Verdict(reward=float(number >= self._poor))
        return Verdict(reward=(1.0 if number < self._good else 0.1) + 0.01 * (number % 2))

    def _split(self, row: TaskRow) -> Split:
        return "heldout" if row["task_id"] in self._heldout else "train"

    def _count(self, split: Split) -> int:
        """Return the number of earlier verdicts of the split."""
        with (self._directory / f"judged-{split}").open("ab") as file:
            file.write(b".")
            return file.tell() - 1
