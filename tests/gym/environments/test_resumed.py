"""Every kind is interrupted at each of its turns and resumed: the outcome equals that of the undisturbed rollout."""

from collections.abc import Sequence
from functools import cache

import pytest

from roundhouse.config.section import Section
from roundhouse.environments import load_any
from roundhouse.environments.base import TaskRow
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.protocol import EnvironmentClient
from roundhouse.trajectories.records import Rollout
from tests.gym.environments.playing import prompt_of
from tests.gym.interrupted import interrupted_before, resumed
from tests.gym.kinds import EACH_KIND, kind_of, smallest
from tests.gym.playground import (
    SAMPLING,
    Reply,
    ScriptedPolicy,
    by_turn,
    rollout_config,
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
