"""A world of two steps; every fourth episode has the fault named by `how`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from roundhouse.environments.base import GymnasiumEnvironment, GymStep, Split, TaskRow, task_row

HALF_AN_EMOJI = "\ud83d"

STEPS: dict[str, dict[str, Any]] = {
    "a surrogate in the observation": {"observation": f"cut {HALF_AN_EMOJI}"},
    "a surrogate in a metric's name": {"metrics": {HALF_AN_EMOJI: 1.0, "moves": 1.0}},
    "a metric that is NaN": {"metrics": {"ratio": math.nan, "moves": 1.0}},
    "a reward beyond float64": {"reward": 10**400},
    "a reward beyond every limit": {"reward": 1e30},
    "a large reward": {"reward": 1e9},
    "rewards that add up to infinity": {"reward": -1.5e308},
}
"""What a step of an episode at fault has in the place of `Faulty.step`'s."""


class Faulty(GymnasiumEnvironment):
    name = "faulty"

    def __init__(self, how: str = "") -> None:
        self.how = how
        self._episodes = itertools.count()

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        extra = {"a surrogate in the task row": HALF_AN_EMOJI, "a task row that is no JSON": {1}}.get(self.how)
        rows = [task_row("Move.", task_id=f"{split}/{number}") for number in range(8)]
        return [rows[0] | {"note": extra}, *rows[1:]]

    async def reset(self, row: TaskRow) -> tuple[Any, str | None]:
        return {"fault": STEPS.get(self.how, {}) if next(self._episodes) % 4 == 0 else {}, "steps": 0}, None

    async def step(self, state: Any, response: dict[str, Any]) -> GymStep:
        state["steps"] += 1
        step = {
            "observation": "on",
            "reward": 0.5,
            "metrics": {"ratio": 1.0, "moves": 1.0},
            "terminated": state["steps"] == 2,
        }
        if self.how == "a failure text with a surrogate" and not state["fault"]:
            raise ValueError(HALF_AN_EMOJI)
        return GymStep(**(step | state["fault"]))
