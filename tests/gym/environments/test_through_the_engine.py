"""Every kind played through the rollout engine by a policy that knows the solution."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from roundhouse.config.environments import EnvironmentConfig
from roundhouse.config.section import Section
from roundhouse.environments import environment_config, load_any
from roundhouse.environments.base import TaskRow
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.trajectories.records import Status
from tests.gym.environments.playing import prompt_of
from tests.gym.kinds import EACH_KIND, having, smallest
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, rollout_config, serving, spec_of

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


@pytest.mark.parametrize("kind", having("lookup", "warehouse", "sql_world", "code", "frozen_lake"))
async def test_over_http_it_gives_the_same_texts_and_the_same_reward(kind: str, tmp_path: Path) -> None:
    """The kinds with sessions, by the contract's routes, in both protocols."""
    local = CONFIG.validate_python({"kind": kind, "problems": 60})
    (shown,) = load_any(local).demonstrations("train", 1, 1.0, seed=1)
    rows = [row for row in load_any(local).tasks("train") if prompt_of(row) == shown[0]["content"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    protocol = "gymnasium" if kind == "frozen_lake" else "tools"
    with serving(build_app(load_any(environment_config(kind, '{"problems": 60}')))) as url:
        files = {"train_tasks": str(tmp_path / "rows.jsonl")}
        remote = CONFIG.validate_python({"kind": "remote", "url": url, "protocol": protocol, **files})
        played = [await outcomes(config, rows, shown) for config in (local, remote)]
    assert played[0] == played[1]
    assert any(reward == 1.0 for _, reward, _ in played[0])


async def outcomes(
    config: EnvironmentConfig, rows: list[TaskRow], shown: list[dict[str, Any]]
) -> list[tuple[Any, ...]]:
    """Return status, reward and the environment's texts of each row's rollout that follows the demonstration."""
    replies: list[dict[str, Any]] = [{"finish_reason": None, **said} for said in shown if said["role"] == "assistant"]
    found = []
    async with open_environment(config) as client:
        for row in rows:
            policy = ScriptedPolicy(by_turn(*replies))
            rollout = await run_rollout(spec_of(row), policy, client, rollout_config(max_turns=12), SAMPLING)
            texts = [item.get("output") or item.get("content") for item in rollout.items]
            found.append((rollout.status, rollout.reward, texts))
    return found
