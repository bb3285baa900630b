"""A Gymnasium world for tests, with planted faults, and the policy's ways to play it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import GymnasiumEnvironment, GymStep, Split, TaskRow, final_text, task_row
from roundhouse.errors import InfraError


class WorldGone(InfraError):
    """A service of the world has failed."""


@dataclass
class Climb:
    """One episode."""

    top: int
    height: int = 0
    steps: int = 0
    closed: int = 0


class Mountain(GymnasiumEnvironment):
    """A number in the reply climbs so far, for a tenth of it as reward; the top ends the episode. A row's `plan` plants
    faults."""

    name = "mountain"

    def __init__(self) -> None:
        self.climbs: list[Climb] = []
        """Every episode ever begun."""

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return [climb_row(f"{split}-{index}") for index in range(20)]

    async def reset(self, row: TaskRow) -> tuple[Any, str | None]:
        if row.get("plan") == "no reset":
            raise ValueError("no mountain")
        climb = Climb(top=row["top"])
        self.climbs.append(climb)
        if row.get("plan") == "odd first":
            return (climb, None), row_value(5)
        return (climb, row.get("plan")), f"The top is at {climb.top}."

    async def step(self, state: Any, response: dict[str, Any]) -> GymStep:
        climb, plan = state
        await asyncio.sleep(0)
        match plan:
            case "step raises":
                raise ValueError("avalanche")
            case "step infra":
                raise WorldGone("the world is gone")
            case "nan":
                return GymStep(None, reward=float("nan"))
            case "odd observation":
                return GymStep(row_value({"height": 1}))
            case "odd outputs":
                return GymStep(None, tool_outputs=row_value([1]))
            case "odd output":
                return GymStep(None, tool_outputs={"call": row_value(7)})
            case "odd info":
                return GymStep(None, info=row_value("high"), terminated=True)
            case "odd metrics":
                return GymStep(None, metrics=row_value(None), terminated=True)
            case "hang":
                await asyncio.sleep(3600)
            case "storm" if climb.steps == 1:
                return GymStep(None, reward=-1.0, truncated=True)
        climb.steps += 1
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        said = final_text(response).split()
        gained = int(said[-1]) if said and said[-1].isdigit() else 0
        climb.height += gained
        return GymStep(
            observation=None if plan == "silent" else f"You are at {climb.height}.",
            reward=gained / 10,
            terminated=climb.height >= climb.top,
            tool_outputs={call["call_id"]: f"{climb.top - climb.height} to go" for call in calls},
            metrics={"height": float(climb.height)},
        )

    async def close(self, state: Any) -> None:
        state[0].closed += 1


def row_value(value: Any) -> Any:
    """A value of a type that the world must not return."""
    return value


def climb_row(task_id: str = "climb", top: int = 3, **fields: Any) -> TaskRow:
    look = {"type": "function", "name": "look", "description": "Look up.", "parameters": {"type": "object"}}
    return task_row("Climb by saying numbers.", task_id=task_id, tools=[look], top=top, **fields)
