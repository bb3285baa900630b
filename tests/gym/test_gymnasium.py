"""The Gymnasium protocol in this process."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from roundhouse.environments.base import TaskRow
from roundhouse.generation.protocol import ContextOverflow, EngineUnreachable
from roundhouse.rollout.agents import play_rollout, run_rollout
from roundhouse.rollout.clients import LocalEpisodeClient
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from tests.gym.playground import (
    SAMPLING,
    Reply,
    ScriptedPolicy,
    by_turn,
    calls,
    rollout_config,
    says,
    serving,
    spec_of,
)
from tests.gym.worlds import Mountain, climb_row


async def play(*replies: Reply, row: TaskRow | None = None, world: Mountain | None = None, **config: Any) -> Rollout:
    client = LocalEpisodeClient(world or Mountain())
    policy = ScriptedPolicy(by_turn(*replies))
    return await run_rollout(spec_of(row or climb_row()), policy, client, rollout_config(**config), SAMPLING)


def texts(rollout: Rollout) -> list[str]:
    return [item["content"] for item in rollout.items if item.get("role") == "user"]


# -- the loop -------------------------------------------------------------------------------------------------------


async def test_the_return_is_the_sum_of_the_steps_rewards_and_observations_are_user_messages():
    rollout = await play(says("1"), says("2"))
    assert (rollout.status, rollout.finish_reason, rollout.reward) == (Status.COMPLETED, "stop", pytest.approx(0.3))
    assert texts(rollout) == ["Climb by saying numbers.", "The top is at 3.", "You are at 1."]
    assert rollout.metrics == {"agent_steps": 2.0, "height": 3.0}
    assert [turn.parent for turn in rollout.turns] == [None, 0]
    assert [turn.reward for turn in rollout.turns] == pytest.approx([0.1, 0.2])


ODD = ("first", "observation", "outputs", "output", "info", "metrics")


@pytest.mark.parametrize("where", ODD)
async def test_a_step_with_a_value_of_another_type_fails_its_rollout_by_name(where: str):
    rollout = await play(says("1"), row=climb_row(plan=f"odd {where}"))
    assert (rollout.failure_kind, rollout.failure_code) == (FailureKind.DATA, "step_failed")
    assert "must be a" in rollout.failure_detail


async def test_the_worlds_answers_to_tool_calls_stand_before_its_observation():
    rollout = await play(calls(("look", {})), says("3"))
    kinds = [item["type"] for item in rollout.items]
    assert kinds == ["message", "message", "function_call", "function_call_output", "message", "message"]
    assert rollout.items[3]["output"] == "3 to go"
    assert rollout.items[4]["content"] == "You are at 0."


async def test_the_first_observation_is_input_and_the_later_ones_are_output():
    spec, policy = spec_of(climb_row()), ScriptedPolicy(by_turn(says("1"), says("2")))
    played = await play_rollout(spec, policy, LocalEpisodeClient(Mountain()), rollout_config(), SAMPLING)
    assert played.response is not None
    assert played.answer is not None
    assert [item["role"] for item in played.response["output"]] == ["assistant", "user", "assistant"]
    assert (played.answer["reward"], played.answer["terminated"]) == (pytest.approx(0.3), True)
    told = played.response_with_tokens()
    assert told is not None
    marked = [index for index, item in enumerate(told["output"]) if "generation_token_ids" in item]
    assert marked == [0, 2], "the last item of each model call carries its tokens"
    assert told["output"][2]["generation_token_ids"] == played.rollout.turns[1].generation_token_ids


@pytest.mark.parametrize(
    ("row", "config", "finish", "reward"),
    [
        ({"top": 99}, {"max_turns": 3}, "max_turns", 0.3),
        ({"plan": "storm"}, {}, "environment", -0.9),
    ],
)
async def test_limits_truncate_and_keep_what_was_earned(row, config, finish, reward):
    rollout = await play(says("1"), row=climb_row(**row), **config)
    assert (rollout.status, rollout.finish_reason) == (Status.TRUNCATED, finish)
    assert rollout.reward == pytest.approx(reward)


async def test_a_conversation_that_outgrows_the_context_is_truncated():
    rollout = await play(says("1"), ContextOverflow("too long"))
    assert (rollout.status, rollout.finish_reason, rollout.reward) == (
        Status.TRUNCATED,
        "max_tokens",
        pytest.approx(0.1),
    )


async def test_an_action_that_uses_the_last_token_is_the_last():
    whole = await play(says("1"), row=climb_row(top=99), max_turns=2)
    used = whole.turns[1].prompt_length + len(whole.turns[1].generation_token_ids)
    policy = ScriptedPolicy(by_turn(says("1")))
    client, config = LocalEpisodeClient(Mountain()), rollout_config(max_tokens=used)
    rollout = await run_rollout(spec_of(climb_row(top=99)), policy, client, config, SAMPLING)
    assert (rollout.status, rollout.finish_reason) == (Status.TRUNCATED, "max_tokens")
    assert (rollout.reward, len(policy.limits)) == (pytest.approx(0.2), 2)


async def test_a_reply_cut_by_length_is_still_an_action():
    rollout = await play(says("1", finish_reason="length"), says("2"))
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, pytest.approx(0.3))


FAULTS = [
    ("no reset", FailureKind.DATA, "seed_failed"),
    ("step raises", FailureKind.DATA, "step_failed"),
    ("step infra", FailureKind.INFRA, None),
    ("nan", FailureKind.DATA, "bad_reward"),
    ("hang", FailureKind.INFRA, "rollout_timeout"),
]


@contextmanager
def client_of(world: Mountain, where: str) -> Iterator[Any]:
    if where == "local":
        yield LocalEpisodeClient(world)
        return
    build_app = pytest.importorskip("roundhouse.plugins.nemo_gym.servers.resources").build_app
    clients = pytest.importorskip("roundhouse.plugins.nemo_gym.clients.resources")
    with serving(build_app(world)) as url:
        yield clients.RemoteEpisodeClient(url)


@pytest.mark.parametrize(("plan", "kind", "code"), FAULTS)
@pytest.mark.parametrize("where", ["local", "remote"])
async def test_a_world_at_fault_gives_a_typed_failure_without_a_reward_and_is_closed(where, plan, kind, code):
    world = Mountain()
    spec, policy = spec_of(climb_row(plan=plan)), ScriptedPolicy(by_turn(says("1")))
    with client_of(world, where) as client:
        async with client:
            rollout = await run_rollout(spec, policy, client, rollout_config(timeout_seconds=0.5), SAMPLING)
        await asyncio.sleep(0.05)
        assert (rollout.status, rollout.failure_kind, rollout.reward) == (Status.FAILED, kind, None)
        if code is not None and (plan, where) != ("nan", "remote"):  # NaN is null on the wire: no number either way
            assert rollout.failure_code == code
        assert [climb.closed for climb in world.climbs] == [1] * len(world.climbs)


async def test_an_engine_that_fails_leaves_no_episode_open():
    world = Mountain()
    rollout = await play(says("1"), EngineUnreachable("gone"), world=world)
    assert (rollout.status, rollout.reward) == (Status.FAILED, None)
    assert [climb.closed for climb in world.climbs] == [1]
