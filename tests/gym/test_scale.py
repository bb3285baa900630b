"""Thousands of rollouts in flight at once: none lost, none failed, and no turn dearer than the first."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from roundhouse.config.models import GenerationConfig, RetryPolicy
from roundhouse.generation.client import HttpPolicyClient
from roundhouse.generation.protocol import Completion
from roundhouse.rollout.clients import LocalEnvironmentClient
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.trajectories.records import Status
from tests.generation.servers import serve
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import SAMPLING, rollout_config, serving_counter, turns_of

pytestmark = pytest.mark.real

PROMPT, REPLY, RESULT = list(range(1000, 1256)), list(range(2000, 2064)), list(range(3000, 3064))


class FakeInstantPolicy:
    """`turns` turns of fixed tokens; the first calls are held back until `together` rollouts wait at the same time."""

    def __init__(self, turns: int, together: int = 1) -> None:
        self._turns = turns
        self._together = together
        self._waiting = 0
        self._all_here = asyncio.Event()

    async def complete(self, messages: list[dict[str, Any]], tools: Any, sampling: Any, seed: int) -> Completion:
        turn = turns_of(messages)
        if turn == 0:
            await self._hold()
        newest = next((message for message in reversed(messages) if "prompt_token_ids" in message), None)
        prompt = PROMPT if newest is None else newest["prompt_token_ids"] + newest["generation_token_ids"] + RESULT
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if turn + 1 < self._turns:
            call = {"name": "add", "arguments": '{"n":1}'}
            message |= {"content": None, "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}]}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        return Completion(message, finish, prompt, REPLY, [-0.5] * len(REPLY), 1, 0.0)

    async def _hold(self) -> None:
        self._waiting += 1
        if self._waiting == self._together:
            self._all_here.set()
        async with asyncio.timeout(100):
            await self._all_here.wait()


@pytest.mark.parametrize(("where", "count"), [("local", 4000), ("remote", 600)])
async def test_thousands_of_rollouts_in_flight_all_complete(where: str, count: int):
    specs = plan_rollouts([counter_row(f"t{index}") for index in range(count)], 1, seed=1, iteration=0)
    config, policy = rollout_config(concurrency=count), FakeInstantPolicy(2, together=count)
    counter = Counter()
    if where == "local":
        rollouts = await collect(specs, policy, LocalEnvironmentClient(counter), config, SAMPLING)
        assert [account.closed for account in counter.accounts] == [1] * count
    else:
        clients = pytest.importorskip("roundhouse.plugins.nemo_gym.clients.resources")
        with serving_counter() as url:
            async with clients.RemoteEnvironmentClient(url) as client:
                rollouts = await collect(specs, policy, client, config, SAMPLING)
    assert [rollout.rollout_id for rollout in rollouts] == [spec.rollout_id for spec in specs]
    assert {(rollout.status, rollout.attempt, rollout.reward) for rollout in rollouts} == {(Status.COMPLETED, 1, 0.1)}


@contextlib.contextmanager
def engine_that_answers_all_at_once(together: int) -> Iterator[tuple[str, list[int]]]:
    """Answers nobody before `together` calls are in flight. Its URL, and how many were in flight as each came."""
    in_flight: list[int] = []
    tokens = {"prompt_token_ids": PROMPT, "generation_token_ids": REPLY, "generation_log_probs": [-0.5] * len(REPLY)}
    choice = {"message": {"role": "assistant", "content": "done", **tokens}, "finish_reason": "stop"}
    answer = json.dumps({"choices": [choice], "policy_version": 1}).encode()

    async def make() -> Any:
        all_here = asyncio.Event()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            in_flight.append(len(in_flight) + 1)
            if len(in_flight) == together:
                all_here.set()
            await all_here.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": answer})

        return application

    with serve(make) as url:
        yield url, in_flight


@pytest.mark.parametrize("concurrency", [300, None])
async def test_as_many_model_calls_are_in_flight_as_rollout_concurrency_says(concurrency: int | None):
    specs = plan_rollouts([counter_row(f"t{index}") for index in range(300)], 1, seed=1, iteration=0)
    config = rollout_config(concurrency=concurrency, retry=RetryPolicy(attempts=1))
    with engine_that_answers_all_at_once(300) as (url, in_flight):
        async with HttpPolicyClient(url, GenerationConfig(request_timeout_seconds=10)) as policy:
            rollouts = await collect(specs, policy, LocalEnvironmentClient(Counter()), config, SAMPLING)
    assert max(in_flight) == 300
    assert {rollout.status for rollout in rollouts} == {Status.COMPLETED}


async def test_a_sixteenth_turn_costs_what_a_first_one_does():
    async def seconds_a_turn(turns: int) -> float:
        specs = plan_rollouts([counter_row(f"t{index}") for index in range(320 // turns)], 1, seed=1, iteration=0)
        begun = time.process_time()
        await collect(specs, FakeInstantPolicy(turns), LocalEnvironmentClient(Counter()), config, SAMPLING)
        return (time.process_time() - begun) / 320

    config = rollout_config(max_turns=16)
    await seconds_a_turn(2)
    pairs = [(await seconds_a_turn(2), await seconds_a_turn(16)) for _ in range(5)]
    # The least of several: another process on the machine can only add to a measurement. A cost that grew with the turns
    # before (history re-sent, re-digested, re-converted) would be several times.
    short, long = min(short for short, _ in pairs), min(long for _, long in pairs)
    assert long < 1.5 * short


async def test_a_rollout_in_flight_keeps_its_tokens_once():
    seen: list[int] = []

    class FakeCounting(FakeInstantPolicy):
        async def complete(self, messages, tools, sampling, seed):
            seen.append(sum("prompt_token_ids" in message for message in messages))
            return await super().complete(messages, tools, sampling, seed)

    specs = plan_rollouts([counter_row()], 1, seed=1, iteration=0)
    config = rollout_config(max_turns=16)
    (rollout,) = await collect(specs, FakeCounting(16), LocalEnvironmentClient(Counter()), config, SAMPLING)
    assert len(rollout.turns) == 16
    assert seen == [0] + [1] * 15
    assert [turn.parent for turn in rollout.turns] == [None, *range(15)]
