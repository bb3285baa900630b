"""The environment of docs/replay.md: answer with a number that is small enough. One of the two verifiers has a bug."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, final_text, task_row


class FirstNumber(Environment):
    """Reward 1 when the first number of the answer is at most `most`."""

    name = "first_number"
    restoration = "replay"

    def __init__(self, most: int = 60, problems: int = 8) -> None:
        self.most, self.problems = most, problems

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        prompts = [f"{split} {number}: a number, at most {self.most}" for number in range(self.problems)]
        return [task_row(prompt, task_id=f"{split}/{number}") for number, prompt in enumerate(prompts)]

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(float(self.is_right(final_text(response).split()[0])))

    def is_right(self, number: str) -> bool:
        return int(number) <= self.most

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


class ComparedAsText(FirstNumber):
    """The same with a bug: "100" <= "60" as text, and "7" is not."""

    def is_right(self, number: str) -> bool:
        return number <= str(self.most)
