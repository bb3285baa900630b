"""A small environment with everything that can go wrong, a scripted policy, and a real server on a free port."""

import asyncio
import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn

from roundhouse.config.models import RetryPolicy, RolloutConfig, Sampling
from roundhouse.environments.base import TaskRow
from roundhouse.generation.protocol import TOKEN_FIELDS, Completion
from roundhouse.http.asgi import KEEP_ALIVE_SECONDS
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests import fork_server
from tests.gym.counter import Counter, counter_row
from tests.ports import free_port
from tests.waiting import until

SAMPLING = Sampling(max_new_tokens=1000)


def rollout_config(**changes: Any) -> RolloutConfig:
    retry = RetryPolicy(attempts=3, first_delay_seconds=0.01, max_delay_seconds=0.05)
    return RolloutConfig.model_validate({"max_tokens": 100_000, "retry": retry} | changes)


async def all_closed(counter: Counter, opened: int) -> None:
    """Each account closed once; the server closes in the background, so give it a moment."""
    await asyncio.to_thread(until, lambda: all(account.closed for account in counter.accounts), "the end of each")
    assert [account.closed for account in counter.accounts] == [1] * opened


def comparable(rollout: Rollout) -> Rollout:
    """The rollout without its clocks and the name of where it was played."""
    turns = [replace(turn, latency_seconds=0.0) for turn in rollout.turns]
    return replace(
        rollout,
        environment="",
        turns=turns,
        started_at=0.0,
        seconds=0.0,
        generation_seconds=0.0,
        environment_seconds=0.0,
    )


def written(rollout: Rollout) -> tuple[Any, Any]:
    """The rows that are stored of a rollout, without its clocks."""
    return tuple(table([comparable(rollout)]).to_pylist() for table in (rollouts_table, turns_table))


def spec_of(row: TaskRow | None = None, sample: int = 0, seed: int = 5) -> RolloutSpec:
    row = row or counter_row()
    return RolloutSpec(row["task_id"], sample, row, seed)


# -- policy ---------------------------------------------------------------------------------------------------------

Reply = dict[str, Any] | BaseException
Script = Callable[[list[dict[str, Any]], int], Reply]
"""From (chat messages, seed) to the next assistant message, or to what the engine raises."""


def says(text: str, finish_reason: str | None = None) -> Reply:
    return {"role": "assistant", "content": text, "finish_reason": finish_reason}


def calls(*named: tuple[str, Any], finish_reason: str | None = None) -> Reply:
    """Tool calls; arguments that are a str go out as they are, others as JSON."""
    wanted = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": value if isinstance(value, str) else json.dumps(value)},
        }
        for index, (name, value) in enumerate(named)
    ]
    return {"role": "assistant", "content": None, "tool_calls": wanted, "finish_reason": finish_reason}


def by_turn(*replies: Reply) -> Script:
    """The replies in order; the last again for ever."""
    return lambda messages, seed: replies[min(turns_of(messages), len(replies) - 1)]


def turns_of(messages: list[dict[str, Any]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def anything(messages: list[dict[str, Any]], seed: int) -> Reply:
    """A policy that does anything, by seed: good calls and bad ones, several at once, long replies."""
    draw = random.Random(seed)
    if turns_of(messages) and draw.random() < 0.3:
        return says(f"It is {draw.randint(0, 99)}.", draw.choice([None, None, "length"]))
    possible: list[tuple[str, Any]] = [
        ("add", {"n": draw.randint(1, 9)}),
        ("add", {"n": 2, "times": draw.randint(1, 9)}),
        ("add", {"n": "x"}),
        ("add", {"n": 10**30}),
        ("add", "not json"),
        ("add", "[1]"),
        ("total", {}),
        ("fail", {}),
        ("no_such_tool", {}),
        ("verify", {}),
        ("../verify", {}),
        ("add?n=1", {"n": 1}),
        ("", {}),
    ]
    return calls(*draw.choices(possible, k=draw.randint(1, 3)))


@dataclass
class ScriptedPolicy:
    """A policy that answers at once from a script. Its tokens are bytes; it keeps the prefix unless the script breaks it."""

    script: Script
    breaks_prefix_at: int | None = None
    """Turn whose prompt is rendered anew, with another beginning."""
    seconds: float | Callable[[int], float] = 0.0
    """Time of an answer; also as a function of the seed."""
    seeds: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0

    async def complete(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], sampling: Sampling, seed: int
    ) -> Completion:
        self.seeds.append(seed)
        self.limits.append(sampling.max_new_tokens)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            await asyncio.sleep(self.seconds(seed) if callable(self.seconds) else self.seconds)
            return self._answer(messages, seed)
        finally:
            self.busy -= 1

    def _answer(self, messages: list[dict[str, Any]], seed: int) -> Completion:
        reply = self.script(messages, seed)
        if isinstance(reply, BaseException):
            raise reply
        message = {key: value for key, value in reply.items() if key != "finish_reason"}
        finish = reply["finish_reason"] or ("tool_calls" if "tool_calls" in message else "stop")
        prompt, generated = self._prompt(messages), list(json.dumps(message).encode())
        # Not all the same, which validation would take for made up; exact in float32, as they are stored.
        log_probs = [-0.5 - place % 8 / 64 for place in range(len(generated))]
        return Completion(message, finish, prompt, generated, log_probs, 3, 0.001)

    def _prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.breaks_prefix_at == turns_of(messages):
            return [0, *_bytes(messages)]
        for index in range(len(messages) - 1, -1, -1):
            if "prompt_token_ids" in messages[index]:
                told = messages[index]
                return told["prompt_token_ids"] + told["generation_token_ids"] + _bytes(messages[index + 1 :])
        return _bytes(messages)


def _bytes(messages: list[dict[str, Any]]) -> list[int]:
    bare = [{key: value for key, value in message.items() if key not in TOKEN_FIELDS} for message in messages]
    return list(json.dumps(bare).encode())


# -- server ---------------------------------------------------------------------------------------------------------


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """A real uvicorn server in a thread; its base URL."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        port = listener.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="critical", timeout_graceful_shutdown=1, timeout_keep_alive=KEEP_ALIVE_SECONDS
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until(lambda: server.started, "a server that has started")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)


@contextmanager
def serving_counter(**options: Any) -> Iterator[str]:
    from roundhouse.plugins.nemo_gym.servers.resources import build_app

    with serving(build_app(Counter(), **options)) as url:
        yield url


@contextmanager
def serving_command(*options: str) -> Iterator[str]:
    """A resources server started by its command; its base URL."""
    port = free_port()
    command = [sys.executable, "-m", "roundhouse.plugins.nemo_gym.servers.resources", *options, "--port", str(port)]
    process = fork_server.start(command)

    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/").json() == {"status": "ok"}
        except httpx.TransportError:
            return False

    try:
        until(answers, "a resources server that answers", process=process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
