"""Every kind is interrupted at each of its turns and resumed: the outcome equals that of the undisturbed rollout."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from roundhouse.config.section import Section
from roundhouse.environments import included_sections, load_any
from roundhouse.environments.base import TaskRow
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.environments.playing import prompt_of
from tests.gym.interrupted import interrupted_before, resumed
from tests.gym.kinds import EACH_KIND, having, kind_of, smallest
from tests.gym.playground import (
    SAMPLING,
    Reply,
    ScriptedPolicy,
    by_turn,
    comparable,
    rollout_config,
    serving,
    spec_of,
    written,
)

CONFIG = rollout_config(max_turns=12)


@cache
def shown(config: type[Section]) -> tuple[str, list[Reply]]:
    """Return a solution: the prompt and the assistant's messages."""
    (messages,) = load_any(smallest(config)).demonstrations("train", 1, 1.0, seed=1)
    return messages[0]["content"], [{"finish_reason": None, **m} for m in messages if m["role"] == "assistant"]


async def solved(client: EnvironmentClient, rows: Sequence[TaskRow], prompt: str, replies: list[Reply]) -> Rollout:
    """The rollout of the row that the solution is for."""
    for row in rows:
        if prompt_of(row) == prompt:
            rollout = await run_rollout(spec_of(row), ScriptedPolicy(by_turn(*replies)), client, CONFIG, SAMPLING)
            if rollout.reward == 1.0:
                return rollout
    raise AssertionError("the solution solves no task")


@pytest.mark.parametrize("config", EACH_KIND)
async def test_each_kind_goes_on_after_any_of_its_turns_and_ends_as_if_it_had_been_left_alone(
    config: type[Section],
) -> None:
    prompt, replies = shown(config)
    async with open_environment(smallest(config)) as client:
        assert client.restoration == ("snapshot" if kind_of(config) == "code" else "replay")
        whole = await solved(client, client.tasks("train"), prompt, replies)
        spec, script = spec_of(whole.task), by_turn(*replies)
        for cut in range(len(replies) + 1):
            parts = await interrupted_before(cut, spec, script, client, CONFIG)
            rollout, policy, journal = await resumed(parts, spec, script, client, CONFIG)
            assert written(rollout) == written(whole)
            assert len(policy.seeds) == len(replies) - cut, "only what was not finished is asked for"
            assert journal.resumptions.turns_resumed == cut
            assert not journal.resumptions.rollouts_restarted


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
