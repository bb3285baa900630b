"""Follow-ups of environments with tools: a reply without a call gets a user message, in each place that plays rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from roundhouse.config.models import CustomEnvironment
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient, open_environment
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.counter import counter_row
from tests.gym.insistent import Insistent
from tests.gym.interrupted import interrupted_before, resumed
from tests.gym.playground import SAMPLING, ScriptedPolicy, by_turn, calls, rollout_config, says, spec_of, written

CONFIG = rollout_config(max_turns=8)
SCRIPT = by_turn(says("None."), calls(("add", {"n": 2})), says("Two."), calls(("add", {"n": 1})), says("Three."))


async def play(client: Any, config: Any = CONFIG, **row: Any) -> Rollout:
    return await run_rollout(spec_of(counter_row(**row)), ScriptedPolicy(SCRIPT), client, config, SAMPLING)


def asked(rollout: Rollout) -> list[str]:
    return [item["content"] for item in rollout.items if item.get("role") == "user"]


async def test_the_policy_continues_after_a_follow_up_until_the_environment_has_none() -> None:
    rollout = await play(LocalEnvironmentClient(Insistent()))
    assert (rollout.status, rollout.finish_reason, rollout.reward) == (Status.COMPLETED, "stop", 0.3)
    assert asked(rollout) == ["Add things up.", "None. But it is 0.", "Two. But it is 2."]
    assert [turn.turn for turn in rollout.turns] == [0, 1, 2, 3, 4]
    short = await play(LocalEnvironmentClient(Insistent()), rollout_config(max_turns=3))
    assert (short.status, short.finish_reason, short.reward) == (Status.TRUNCATED, "max_turns", 0.2)
    failed = await play(LocalEnvironmentClient(Insistent()), verdict="no follow-up")
    assert (failed.status, failed.failure_code) == (Status.FAILED, "step_failed")
    assert "insistent: follow_up raised ValueError('nothing to ask')" in failed.failure_detail


@pytest.mark.parametrize("cut", range(1, 5))
async def test_an_interrupted_rollout_resumes_after_its_follow_ups(cut: int) -> None:
    client, spec = LocalEnvironmentClient(Insistent()), spec_of(counter_row())
    parts = await interrupted_before(cut, spec, SCRIPT, client, CONFIG)
    rollout, policy, journal = await resumed(parts, spec, SCRIPT, client, CONFIG)
    assert written(rollout) == written(await play(client))
    assert (len(policy.seeds), journal.resumptions.turns_resumed) == (5 - cut, cut)


async def test_a_stored_rollout_is_judged_again_with_its_follow_ups() -> None:
    judge_one = pytest.importorskip("roundhouse.plugins.lab.replays.rollouts").judge_one
    client = LocalEnvironmentClient(Insistent())
    judged = await judge_one(await play(client), client)
    assert (judged.outcome, judged.reason) == ("equal", "")


@pytest.mark.real
async def test_a_separate_process_has_the_same_follow_ups() -> None:
    section = CustomEnvironment(kind="custom", target=f"{Insistent.__module__}:Insistent")
    async with open_environment(section) as environment:
        local = LocalEnvironmentClient(Insistent())
        for row in ({}, {"verdict": "no follow-up"}):
            assert written(await play(environment, **row)) == written(await play(local, **row))
