"""Environments of each kind over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from roundhouse.config.environments import EnvironmentConfig
from roundhouse.environments import environment_config, included_sections, load, load_any
from roundhouse.environments.base import TaskRow
from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.trajectories.records import Status
from tests.gym.environments.playing import prompt_of
from tests.gym.environments.test_resumed import shown, solved
from tests.gym.interrupted import interrupted_before, resumed
from tests.gym.kinds import having, kind_of, smallest
from tests.gym.playground import (
    SAMPLING,
    ScriptedPolicy,
    by_turn,
    comparable,
    rollout_config,
    serving,
    spec_of,
)

CONFIG = rollout_config(max_turns=12)
KINDS: TypeAdapter[EnvironmentConfig] = TypeAdapter(EnvironmentConfig)


def test_a_remote_environment_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"http://gym:8000.*over HTTP"):
        load(RemoteEnvironment(kind="remote", url="http://gym:8000", train_tasks="tasks.jsonl"))


@pytest.mark.parametrize("kind", having("warehouse", "frozen_lake"))
async def test_a_server_said_to_be_repeatable_goes_on_like_the_environment_in_process(
    kind: str, tmp_path: Path
) -> None:
    config = next(each for each in included_sections() if kind_of(each) == kind)
    prompt, replies = shown(config)
    local = load_any(smallest(config))
    rows = [row for row in local.tasks("train") if prompt_of(row) == prompt]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    terms = {"protocol": "gymnasium" if kind == "frozen_lake" else "tools", "restore": "replay"}
    with serving(build_app(local)) as url:
        remote = RemoteEnvironment.model_validate({"kind": "remote", "url": url, "train_tasks": str(file), **terms})
        async with open_environment(remote) as client:
            whole = await solved(client, rows, prompt, replies)
            spec, script = spec_of(whole.task), by_turn(*replies)
            parts = await interrupted_before(len(replies) - 1, spec, script, client, CONFIG)
            rollout, policy, _ = await resumed(parts, spec, script, client, CONFIG)
            assert (rollout.status, comparable(rollout)) == (Status.COMPLETED, comparable(whole))
            assert len(policy.seeds) == 1


@pytest.mark.parametrize("kind", having("lookup", "warehouse", "sql_world", "code", "frozen_lake"))
async def test_over_http_it_gives_the_same_texts_and_the_same_reward(kind: str, tmp_path: Path) -> None:
    """The kinds with sessions, by the contract's routes, in both protocols."""
    local = KINDS.validate_python({"kind": kind, "problems": 60})
    (shown,) = load_any(local).demonstrations("train", 1, 1.0, seed=1)
    rows = [row for row in load_any(local).tasks("train") if prompt_of(row) == shown[0]["content"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    protocol = "gymnasium" if kind == "frozen_lake" else "tools"
    with serving(build_app(load_any(environment_config(kind, '{"problems": 60}')))) as url:
        files = {"train_tasks": str(tmp_path / "rows.jsonl")}
        remote = KINDS.validate_python({"kind": "remote", "url": url, "protocol": protocol, **files})
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
