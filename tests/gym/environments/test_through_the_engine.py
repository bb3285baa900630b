"""Every kind played through the rollout engine by a policy that knows the solution."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.section import Section
from roundhouse.environments import load_any
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.trajectories.records import Status
from tests.gym.environments.playing import prompt_of
from tests.gym.kinds import EACH_KIND, smallest
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config, spec_of

CONFIG: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


@pytest.mark.parametrize("config", EACH_KIND)
async def test_a_shown_solution_completes_one_of_its_tasks_with_reward_one(config: type[Section]) -> None:
    """Several tasks may share a prompt (a hidden number, a lake that appears later); the solution belongs to one of them."""
    (shown,) = load_any(smallest(config)).demonstrations("train", 1, 1.0, seed=1)
    replies: list[dict[str, Any]] = [{"finish_reason": None, **said} for said in shown if said["role"] == "assistant"]
    async with open_environment(smallest(config)) as client:
        for row in client.tasks("train"):
            if prompt_of(row) == shown[0]["content"]:
                policy = ScriptedPolicy(by_turn(*replies))
                rollout = await run_rollout(spec_of(row), policy, client, rollout_config(max_turns=12), SAMPLING)
                if rollout.reward == 1.0:
                    break
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 1.0)
    assert len(rollout.turns) == len(replies)
    assert sum(rollout.reward_components.values() or [1.0]) == pytest.approx(1.0)
