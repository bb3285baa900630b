"""The server of environments in OpenEnv's protocol: its limits, its errors and its requests without a connection."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.environments import environment_config, load_to_serve
from roundhouse.http.asgi import SameOrigin
from roundhouse.plugins.openenv.environment import MOST_MESSAGE_BYTES
from roundhouse.plugins.openenv.server import build_app
from tests.gym.counter import Counter
from tests.ports import free_port
from tests.waiting import until


@contextlib.contextmanager
def serving(*kinds: Any, sessions: int = 8, idle_seconds: float = 60) -> Iterator[dict[str, str]]:
    """Serve environments, by kind or as objects; yield the URL of each by name."""
    urls, running = {}, []
    for kind in kinds:
        environment = load_to_serve(environment_config(kind)) if isinstance(kind, str) else kind
        port = free_port()
        served = SameOrigin(build_app(environment, sessions, idle_seconds), "127.0.0.1")
        server = uvicorn.Server(uvicorn.Config(served, port=port, log_level="warning", ws_max_size=MOST_MESSAGE_BYTES))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        urls[environment.name] = f"http://127.0.0.1:{port}"
    until(lambda: all(server.started for server, _ in running), "the servers")
    yield urls
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


async def told(socket: Any, message: Any) -> dict[str, Any]:
    await socket.send_str(message if isinstance(message, str) else json.dumps(message))
    return await socket.receive_json(timeout=10)


async def test_messages_have_the_codes_of_the_protocol() -> None:
    with serving("calculator") as urls:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{urls['calculator']}/ws") as socket:
            for message, code in (
                ("{", "INVALID_JSON"),
                ("[" * 5000, "INVALID_JSON"),
                ([1], "INVALID_JSON"),
                ({"type": ["reset"]}, "UNKNOWN_TYPE"),
                ({"type": "step", "data": {"text": "1"}}, "EXECUTION_ERROR"),
                ({"type": "step"}, "VALIDATION_ERROR"),
                ({"type": "step", "data": 3}, "VALIDATION_ERROR"),
                ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
            ):
                assert (await told(socket, message))["data"]["code"] == code, message
            reset = await told(socket, {"type": "reset", "data": {"seed": 716, "episode_id": "e"}})
            assert reset["data"]["observation"]["text"] == "What is 10*4+1?"  # of 716 tasks
            ended = await told(socket, {"type": "step", "data": {"text": "The answer is 41."}})
            assert (ended["data"]["reward"], ended["data"]["done"]) == (1.0, True)
            assert (await told(socket, {"type": "state"}))["data"] == {"episode_id": "e", "step_count": 1}
            again = await told(socket, {"type": "step", "data": {"text": "41"}})
            assert "Send a reset first" in again["data"]["message"]


async def test_sessions_are_limited_in_number_and_idle_time_and_closed_once() -> None:
    counter = Counter()
    with serving(counter, sessions=1, idle_seconds=0.5) as urls:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{urls[counter.name]}/ws") as socket:
            assert (await told(socket, {"type": "reset"}))["type"] == "observation"
            async with http.ws_connect(f"{urls[counter.name]}/ws") as other:
                refused = await other.receive_json(timeout=10)
                assert refused["data"]["code"] == "CAPACITY_REACHED"
            idle = await socket.receive_json(timeout=10)
            assert "idle for 0.5 s" in idle["data"]["message"]
            assert (await socket.receive(timeout=10)).type is aiohttp.WSMsgType.CLOSE
        until(lambda: all(account.closed for account in counter.accounts), "the close")
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{urls[counter.name]}/ws") as socket:
            await told(socket, {"type": "reset"})
            await told(socket, {"type": "reset"})
        until(lambda: all(account.closed for account in counter.accounts), "the close")
    assert [account.closed for account in counter.accounts] == [1, 1, 1]


async def test_pages_of_other_sites_and_large_messages_are_refused() -> None:
    with serving("calculator") as urls:
        url = urls["calculator"]
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await http.ws_connect(f"{url}/ws", headers={"Origin": "http://elsewhere.example"})
            async with http.ws_connect(f"{url}/ws") as socket:
                with contextlib.suppress(ConnectionError):  # the server closes it before all is sent
                    await socket.send_str(" " * (MOST_MESSAGE_BYTES + 1))
                closed = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
                assert (await socket.receive(timeout=10)).type in closed
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health", headers={"Host": "elsewhere.example"})).status_code == 421
    transport = httpx.ASGITransport(build_app(load_to_serve(environment_config("calculator")), 1, 60))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.post("/step", content=b" " * (MOST_MESSAGE_BYTES + 1))).status_code == 413


async def test_a_request_plays_one_action_of_its_own_episode() -> None:
    with serving("sort") as urls:
        async with httpx.AsyncClient(base_url=urls["sort"]) as client:
            reset = (await client.post("/reset", json={"seed": 0})).json()
            assert reset["observation"]["text"].startswith("Sort ")
            answer = " ".join(sorted(reset["observation"]["text"].removeprefix("Sort ").removesuffix(".").split()))
            step = (await client.post("/step", json={"seed": 0, "action": {"text": answer}})).json()
            assert (step["reward"], step["done"]) == (1.0, True)
            assert (await client.post("/step", json={"action": {"number": 1}})).status_code == 422
            assert (await client.post("/step", content=b"{")).status_code == 422
            assert (await client.get("/health")).json() == {"status": "healthy"}
            assert set((await client.get("/schema")).json()) == {"action", "observation", "state"}


def test_the_command_refuses_an_unknown_environment_with_the_remedy() -> None:
    result = CliRunner().invoke(app, ["openenv", "serve", "--environment", "calculater"])
    assert result.exit_code != 0
    assert "--environment calculater" in f"{result.output}{result.exception}"
