"""An environment costs its author two files: its class, and the section of a configuration that names it."""

from __future__ import annotations

from pathlib import Path

from roundhouse.config.loading import load_config
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Status
from tests.gym.playground import ScriptedPolicy, by_turn, calls, says

ENVIRONMENT = """
from roundhouse.environments.base import Environment, Verdict, final_text, task_row, tool


class Weather(Environment):
    name = "weather"

    def __init__(self, city: str) -> None:
        self.city = city

    def tasks(self, split):
        question = f"Is it raining in {self.city}?"
        return [task_row(question, task_id=f"{split}/1", tools=self.tool_schemas(), answer="yes")]

    @tool("Look up the weather.", city="Name of the city.")
    async def weather(self, session, city: str) -> str:
        return "rain" if city == self.city else "sun"

    async def verify(self, session, row, response):
        return Verdict(reward=float(row["answer"] in final_text(response).lower()))
"""

CONFIGURATION = """
run_id: weather
environment:
  kind: custom
  target: ${CONFIG_DIR}/weather.py:Weather
  parameters: {city: Oslo}
policy: {kind: pretrained, path: /models/tiny}
"""


async def test_an_environment_from_outside_is_one_class_and_one_section(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(ENVIRONMENT)
    (tmp_path / "weather.yaml").write_text(CONFIGURATION)
    config = load_config(tmp_path / "weather.yaml")
    policy = ScriptedPolicy(by_turn(calls(("weather", {"city": "Oslo"})), says("Yes.")))
    async with open_environment(config.environment) as environment:
        (spec,) = plan_rollouts(environment.tasks("train"), group_size=1, seed=1, iteration=0)
        rollout = await run_rollout(spec, policy, environment, config.rollout, config.generation.sampling)
    assert (rollout.status, rollout.reward, rollout.environment) == (Status.COMPLETED, 1.0, "weather")
    assert [item["output"] for item in rollout.items if item["type"] == "function_call_output"] == ["rain"]
