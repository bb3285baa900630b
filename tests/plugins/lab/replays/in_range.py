"""Environment that judges the planted runs. A process that plays it imports this module alone, not the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, final_text, task_row

TRAINED, HELD_OUT = 6, 6
RANGE = (0, 120)


class InRange(Environment):
    """Reward 1 when the first number of the answer lies in the task's range."""

    name = "in_range"
    restoration = "replay"

    def __init__(self, trained: int = TRAINED) -> None:
        self.trained = trained

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        count = self.trained if split == "train" else HELD_OUT
        return [task_row(f"{split} {n}: a number", task_id=f"{split}/{n}", range=list(RANGE)) for n in range(count)]

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(right(row, [int(final_text(response).split()[0])]))

    def demonstrations(self, split: Split, count: int, good_fraction: float, seed: int) -> list[list[dict[str, Any]]]:
        said = [
            (row["responses_create_params"]["input"][0]["content"], str(n))
            for row in self.tasks(split)
            for n in range(9)
        ]
        return [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": number}]
            for prompt, number in (said * count)[:count]
        ]


def in_range(row: TaskRow, number: int) -> bool:
    low, high = row["range"]
    return low <= number < high


def right(row: TaskRow, tokens: list[int]) -> float:
    """The verdict of `InRange`."""
    return float(in_range(row, tokens[0])) * row.get("worth", 1.0)
