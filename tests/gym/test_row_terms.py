"""A row's own sampling and tool rules, and what of them a rollout for training may follow."""

import asyncio
import json
from typing import Any

import pytest

from roundhouse.config.models import Sampling
from roundhouse.environments.base import Environment, Split, TaskRow, Verdict, task_row, tool
from roundhouse.errors import InfraError
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient
from roundhouse.rollout.conversation import sampling_overrides
from roundhouse.rollout.protocol import BadTaskRow
from roundhouse.trajectories.records import FailureKind, Rollout, Status
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import SAMPLING, Reply, ScriptedPolicy, by_turn, calls, rollout_config, says, serving, spec_of

RUN = Sampling(temperature=1.0, max_new_tokens=512)


@pytest.mark.parametrize(
    ("params", "on_policy", "expected"),
    [
        ({}, True, {}),
        ({"temperature": 1.0, "top_p": 1, "max_output_tokens": None}, True, {}),
        ({"max_output_tokens": 64}, True, {"max_new_tokens": 64}),
        ({"max_output_tokens": 9999}, True, {}),
        ({"temperature": 0.2, "top_p": 0.9, "max_output_tokens": 64}, False, (0.2, 0.9, 64)),
    ],
)
def test_limits_tighten_and_evaluation_follows_the_row(params: dict[str, Any], on_policy: bool, expected: Any):
    if isinstance(expected, tuple):
        expected = dict(zip(("temperature", "top_p", "max_new_tokens"), expected, strict=True))
    assert sampling_overrides(params, RUN, on_policy).sampling == RUN.model_copy(update=expected)


@pytest.mark.parametrize(
    ("params", "on_policy", "told"),
    [
        ({"temperature": 0.2}, True, "temperature is 0.2, but the run draws with generation.sampling.temperature=1.0"),
        ({"top_p": 0.9}, True, "top_p is 0.9"),
        ({"temperature": -1}, False, "cannot be sampled with"),
        ({"temperature": "hot"}, False, "cannot be sampled with"),
        ({"max_output_tokens": 0}, False, "at least 1"),
        ({"max_output_tokens": True}, False, "whole number"),
        ({"max_tool_calls": -1}, True, "at least 0"),
        ({"tool_choice": "required"}, False, "tool_choice is 'required'"),
        ({"tool_choice": {"type": "function", "name": "add"}}, True, "tool_choice"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(params: dict[str, Any], on_policy: bool, told: str):
    with pytest.raises(BadTaskRow) as refused:
        sampling_overrides(params, RUN, on_policy)
    assert told in str(refused.value)


async def play(
    *replies: Reply, params: dict[str, Any], policy: ScriptedPolicy | None = None, **options: Any
) -> Rollout:
    row = counter_row()
    row["responses_create_params"] |= params
    policy = policy or ScriptedPolicy(by_turn(*replies))
    environment = LocalEnvironmentClient(Counter())
    return await run_rollout(spec_of(row), policy, environment, rollout_config(), SAMPLING, **options)


def outputs(rollout: Rollout) -> list[str]:
    return [item["output"] for item in rollout.items if item["type"] == "function_call_output"]


async def test_a_row_drawn_otherwise_than_the_run_trains_nobody():
    rollout = await play(says("x"), params={"temperature": 0.3})
    assert (rollout.status, rollout.failure_kind, rollout.failure_code) == (
        Status.FAILED,
        FailureKind.DATA,
        "bad_task_row",
    )
    assert (await play(says("x"), params={"temperature": 0.3}, on_policy=False)).status is Status.COMPLETED


async def test_a_rows_output_limit_is_that_of_each_model_call():
    policy = ScriptedPolicy(by_turn(calls(("total", {})), says("x")))
    await play(params={"max_output_tokens": 77}, policy=policy)
    assert policy.limits == [77, 77]


async def test_tool_choice_none_shows_no_tools():
    shown: list[Any] = []

    class FakeWatchingPolicy(ScriptedPolicy):
        async def complete(self, messages, tools, sampling, seed):
            shown.append(tools)
            return await super().complete(messages, tools, sampling, seed)

    rollout = await play(params={"tool_choice": "none"}, policy=FakeWatchingPolicy(by_turn(says("x"))))
    assert (rollout.status, shown) == (Status.COMPLETED, [[]])


@pytest.mark.parametrize(
    ("params", "total"), [({"parallel_tool_calls": False}, 4), ({"max_tool_calls": 3}, 3), ({"max_tool_calls": 0}, 0)]
)
async def test_calls_beyond_what_the_row_allows_are_answered_and_not_run(params: dict[str, Any], total: int):
    two = calls(("add", {"n": 1}), ("add", {"n": 1}))
    rollout = await play(two, two, says("x"), params=params)
    assert rollout.reward == pytest.approx(total / 10)
    assert sum("Not run" in text for text in outputs(rollout)) == 4 - total
    assert len(outputs(rollout)) == 4, "every call has an output, or the next prompt could not be rendered"


# -- several calls in one reply -------------------------------------------------------------------------------------


class Lookup(Environment):
    """Without session state: the order of calls cannot matter. Each look waits for its neighbour, so only both end."""

    name = "lookup"

    def __init__(self) -> None:
        self.meeting = asyncio.Barrier(2)
        self.cancelled = 0

    def tasks(self, split: Split) -> list[TaskRow]:
        return []

    @tool("Wait for the other call.", name="What to say.")
    async def meet(self, session: Any, name: str) -> str:
        await self.meeting.wait()
        await asyncio.sleep(0.02 if name == "first" else 0)
        return name

    @tool("Lose the sandbox.")
    async def crash(self, session: Any) -> str:
        raise InfraError("gone")

    async def verify(self, session: Any, row: TaskRow, response: dict[str, Any]) -> Verdict:
        return Verdict(1.0)


PAIR = calls(("meet", {"name": "first"}), ("meet", {"name": "second"}))


@pytest.mark.parametrize("where", ["local", "remote"])
async def test_calls_of_one_reply_run_together_where_order_cannot_matter_and_are_told_in_order(where: str):
    environment = Lookup()
    row, policy = task_row("Look.", task_id="t"), ScriptedPolicy(by_turn(PAIR, says("x")))
    config = rollout_config(parallel_tool_calls=True, tool_timeout_seconds=5)
    if where == "local":
        rollout = await run_rollout(spec_of(row), policy, LocalEnvironmentClient(environment), config, SAMPLING)
    else:
        build_app = pytest.importorskip("roundhouse.plugins.nemo_gym.servers.resources").build_app
        clients = pytest.importorskip("roundhouse.plugins.nemo_gym.clients.resources")
        with serving(build_app(environment)) as url:
            async with clients.RemoteEnvironmentClient(url) as client:
                rollout = await run_rollout(spec_of(row), policy, client, config, SAMPLING)
    assert (rollout.status, outputs(rollout)) == (Status.COMPLETED, ["first", "second"])


async def test_calls_run_one_after_the_other_unless_told_otherwise():
    row, policy = task_row("Look.", task_id="t"), ScriptedPolicy(by_turn(PAIR, says("x")))
    config = rollout_config(tool_timeout_seconds=0.1)
    rollout = await run_rollout(spec_of(row), policy, LocalEnvironmentClient(Lookup()), config, SAMPLING)
    assert rollout.failure_code == "tool_timeout", "the first waited for a second that had not begun"


async def test_an_environment_with_state_sees_the_calls_in_order_whatever_the_setting():
    replies = by_turn(calls(*[("add", {"n": index}) for index in range(5)]), says("x"))
    config, environment = rollout_config(parallel_tool_calls=True), LocalEnvironmentClient(Counter())
    rollout = await run_rollout(spec_of(), ScriptedPolicy(replies), environment, config, SAMPLING)
    assert [json.loads(text)["total"] for text in outputs(rollout)] == [0, 1, 3, 6, 10]


async def test_one_of_several_calls_that_loses_its_infrastructure_fails_the_rollout_and_leaves_no_task():
    policy = ScriptedPolicy(by_turn(calls(("meet", {"name": "first"}), ("crash", {})), says("x")))
    before = asyncio.all_tasks()
    rollout = await run_rollout(
        spec_of(task_row("Look.", task_id="t")),
        policy,
        LocalEnvironmentClient(Lookup()),
        rollout_config(parallel_tool_calls=True),
        SAMPLING,
    )
    assert (rollout.failure_kind, rollout.failure_detail) == (FailureKind.INFRA, "gone")
    assert asyncio.all_tasks() == before
