"""The tools of our resources server over MCP, called by the SDK's client and by our own, each call in its rollout's session."""

import asyncio
import json
import queue
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from fastapi import FastAPI, Request
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from roundhouse.environments.base import Environment, Verdict, task_row, tool
from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.clients.resources import RemoteEnvironmentClient
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.plugins.nemo_gym.servers.own_server import own_server
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.responses import response_object
from roundhouse.trajectories.records import Rollout, Status
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import (
    SAMPLING,
    ScriptedPolicy,
    all_closed,
    by_turn,
    calls,
    rollout_config,
    says,
    serving,
    serving_command,
    spec_of,
)
from tests.gym.worlds import Mountain

TOKEN = "X-NeMo-Gym-Session-Token"


def bare_row(task_id: str = "t", **fields: Any) -> dict[str, Any]:
    """A row without tools."""
    return task_row("Add things up.", task_id=task_id, **fields)


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def url(counter: Counter) -> Iterator[str]:
    with serving(build_app(counter, expose_tools_over_mcp=True, request_seconds=1.0)) as url:
        yield url


async def offered(client: httpx.AsyncClient, owner: str = "t") -> dict[str, Any]:
    offer: dict[str, Any] = (await client.post("/seed_session", json=counter_row(owner))).json()["mcp"]
    return offer


def seeded(url: str, owner: str) -> dict[str, Any]:
    offer: dict[str, Any] = httpx.post(f"{url}/seed_session", json=counter_row(owner)).json()["mcp"]
    return offer


@asynccontextmanager
async def connected(url: str, headers: dict[str, str], **options: Any):
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http), **options) as client,
    ):
        yield client


def texts(result) -> str:
    return result.content[0].text


# -- the server -----------------------------------------------------------------------------------------------------


def test_a_session_comes_with_what_its_client_needs_for_mcp(url: str):
    offer = seeded(url, "a")
    token = offer["headers"].pop(TOKEN)
    assert offer == {"server_name": "counter", "url_path": "/mcp", "transport": "http", "headers": {}}
    assert token != seeded(url, "b")["headers"][TOKEN]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_two_rollouts_at_once_work_each_on_its_own_session(url: str, counter: Counter, mode: str):
    first, second = seeded(url, "first"), seeded(url, "second")
    async with (
        connected(url, first["headers"], mode=mode) as one,
        connected(url, second["headers"], mode=mode) as two,
    ):
        assert {each.name for each in (await one.list_tools()).tools} == set(Counter().tools())
        for _ in range(3):
            await asyncio.gather(one.call_tool("add", {"n": 1}), two.call_tool("add", {"n": 10}))
        assert texts(await one.call_tool("total", {})) == "3 für first"
        assert texts(await two.call_tool("total", {})) == "30 für second"
    assert [(account.owner, account.total) for account in counter.accounts] == [("first", 3), ("second", 30)]


async def test_a_session_is_one_over_mcp_and_over_plain_routes(url: str):
    async with httpx.AsyncClient(base_url=url) as client:
        async with connected(url, (await offered(client, "x"))["headers"]) as mcp:
            await mcp.call_tool("add", {"n": 4})
        assert (await client.post("/total", json={})).text == "4 für x"


@pytest.mark.parametrize("token", [None, "", "no token", "eyJzaWQiOiJ4In0.AAAA"])
async def test_without_its_token_a_call_reaches_no_session(url: str, counter: Counter, token: str | None):
    seeded(url, "somebody")
    headers = {} if token is None else {TOKEN: token}
    async with connected(url, headers) as client:
        assert (await client.list_tools()).tools
        with pytest.raises(MCPError, match=TOKEN):
            await client.call_tool("add", {"n": 1})
    assert counter.accounts[0].total == 0


async def test_a_token_of_another_process_is_none_here(url: str, counter: Counter):
    with serving(build_app(Counter(), expose_tools_over_mcp=True)) as other:
        stolen = seeded(other, "elsewhere")
    seeded(url, "somebody")
    async with connected(url, stolen["headers"]) as client:
        with pytest.raises(MCPError, match="another server's"):
            await client.call_tool("add", {"n": 1})
    assert counter.accounts[0].total == 0


async def test_what_goes_wrong_with_a_tool_is_told_as_over_its_plain_route(url: str):
    async with connected(url, seeded(url, "a")["headers"]) as client:
        for name, arguments, text in (
            ("fail", {}, "ValueError('no such \\\"thing\\\"')"),
            ("add", {}, "Field required"),
            ("subtract", {}, "Not Found"),
        ):
            told = await client.call_tool(name, arguments)
            assert told.is_error
            assert text in texts(told)


@pytest.mark.parametrize(("name", "text"), [("crash", "SandboxDown"), ("hang", "did not return within 1 s")])
async def test_a_failure_of_the_infrastructure_is_an_error_that_says_so(url: str, name: str, text: str):
    async with connected(url, seeded(url, "a")["headers"]) as client:
        with pytest.raises(MCPError, match=text) as raised:
            await client.call_tool(name, {})
    assert raised.value.data == {"failure": "infra"}


async def test_a_session_that_ended_is_known_no_more_and_ends_what_runs_in_it():
    digging: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Digger(Counter):
        @tool("Dig for ever.")
        async def dig(self, session) -> str:
            digging.put("begun")
            await asyncio.sleep(3600)
            return ""

    with serving(build_app(Digger(), expose_tools_over_mcp=True)) as url:
        async with httpx.AsyncClient(base_url=url) as client, connected(url, (await offered(client))["headers"]) as mcp:
            call = asyncio.create_task(mcp.call_tool("dig", {}))
            await asyncio.to_thread(digging.get, timeout=10)
            await client.post("/close", json={})
            with pytest.raises(MCPError, match="SessionEnded"):
                await call
            with pytest.raises(MCPError, match="UnknownSession"):
                await mcp.call_tool("total", {})


class Spelling(Environment):
    """Rewards calls of `define`, by that bare name. It keeps no state."""

    name = "spelling"

    def tasks(self, split):
        return []

    @tool("Look a word up.", word="The word.")
    async def define(self, session, word: str) -> str:
        return f"{word} is a word"

    async def verify(self, session, row, response):
        return Verdict(float(sum(item.get("name") == "define" for item in response["output"])))


async def test_names_are_bare_for_the_verifier_and_come_back_as_the_agent_gave_them():
    called = [
        {"type": "function_call", "call_id": str(index), "name": name, "arguments": "{}"}
        for index, name in enumerate(["mcp__words__define", "define", "mcp__other__define", "mcp__words__spell"])
    ]
    body = bare_row() | {"response": response_object("resp_1", called, model="policy", created_at=0.0)}
    with serving(build_app(Spelling(), "words", expose_tools_over_mcp=True)) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            verdict = (await client.post("/verify", json=body)).json()
        async with connected(url, seeded(url, "any")["headers"]) as client:
            assert texts(await client.call_tool("define", {"word": "rail"})) == "rail is a word"
    assert verdict["reward"] == 2.0, "the own prefix and the bare name count, another server's does not"
    assert verdict["response"]["output"] == called


def test_mcp_is_served_only_where_it_was_asked_for_and_never_for_a_gymnasium_world():
    with serving(build_app(Counter())) as url:
        assert "mcp" not in httpx.post(f"{url}/seed_session", json=counter_row()).json()
        assert httpx.post(f"{url}/mcp", json={}).status_code == 404
    with pytest.raises(ConfigError, match="expose_tools_over_mcp is set, but mountain"):
        build_app(Mountain(), expose_tools_over_mcp=True)


def test_the_command_and_the_configuration_offer_it():
    with serving_command("--environment", "sort", "--mcp", "--name", "sorting") as url:
        told = httpx.post(f"{url}/seed_session", json={}).json()
    assert told["mcp"]["server_name"] == "sorting"
    config = """
    calc:
      resources_servers:
        roundhouse_environment:
          {environment: {kind: calculator}, expose_tools_over_mcp: true, host: 127.0.0.1, port: 1}
    """
    server = own_server({"NEMO_GYM_CONFIG_DICT": config, "NEMO_GYM_CONFIG_PATH": "calc"})
    with serving(server.app) as url:
        assert seeded(url, "any")["server_name"] == "calc"


# -- our client -----------------------------------------------------------------------------------------------------


class FakeShownPolicy(ScriptedPolicy):
    """Remembers the tools that it was shown."""

    shown: list[str]

    async def complete(self, messages, tools, sampling, seed):
        self.shown = [each["function"]["name"] for each in tools]
        return await super().complete(messages, tools, sampling, seed)


def called(rollout: Rollout) -> list[str]:
    return [item["name"] for item in rollout.items if item["type"] == "function_call"]


async def play(url: str, row: dict[str, Any], *replies) -> tuple[Rollout, list[str]]:
    policy = FakeShownPolicy(by_turn(*replies))
    async with RemoteEnvironmentClient(url) as environment:
        rollout = await run_rollout(spec_of(row), policy, environment, rollout_config(), SAMPLING)
    return rollout, policy.shown


async def test_our_client_offers_the_policy_what_the_server_offers_in_its_answer(url: str, counter: Counter):
    add = calls(("mcp__counter__add", {"n": 2}))
    rollout, shown = await play(url, bare_row(), add, add, says("done"))
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 0.4)
    assert shown == [f"mcp__counter__{name}" for name in Counter().tools()]
    assert called(rollout) == ["mcp__counter__add"] * 2
    assert [tool["name"] for tool in rollout.task["responses_create_params"]["tools"]] == shown
    await all_closed(counter, 1)


async def test_many_rollouts_at_once_share_no_state(url: str, counter: Counter):
    def adds_its_seed(messages, seed):
        turn = sum(message["role"] == "assistant" for message in messages)
        return says("done") if turn == 3 else calls(("mcp__counter__add", {"n": 1}))

    specs = plan_rollouts([bare_row(f"t{index}") for index in range(16)], 1, seed=1, iteration=0)
    async with RemoteEnvironmentClient(url) as environment:
        rollouts = await collect(
            specs, ScriptedPolicy(adds_its_seed), environment, rollout_config(concurrency=16), SAMPLING
        )
    assert {(rollout.status, rollout.reward) for rollout in rollouts} == {(Status.COMPLETED, 0.3)}
    assert {(account.owner, account.total) for account in counter.accounts} == {(f"t{i}", 3) for i in range(16)}


async def test_tools_that_the_row_has_are_not_offered_twice(url: str):
    rollout, shown = await play(url, counter_row(), calls(("add", {"n": 3})), says("done"))
    assert (rollout.reward, shown) == (0.3, list(Counter().tools()))


async def test_an_offer_can_be_passed_over(url: str, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(bare_row()) + "\n")
    config = RemoteEnvironment(kind="remote", url=url, session_mcp=False, train_tasks=str(rows))
    policy = FakeShownPolicy(by_turn(calls(("mcp__counter__add", {"n": 3})), says("done")))
    async with open_environment(config) as environment:
        rollout = await run_rollout(spec_of(bare_row()), policy, environment, rollout_config(), SAMPLING)
    assert (rollout.status, rollout.reward, policy.shown) == (Status.COMPLETED, 0.0, [])
    assert rollout.metrics["agent_tool_failures"] == 1


async def test_a_failure_of_the_infrastructure_behind_an_mcp_tool_fails_the_attempt(url: str, counter: Counter):
    rollout, _ = await play(url, bare_row(), calls(("mcp__counter__crash", {})), says("done"))
    assert (rollout.status, rollout.failure_code) == (Status.FAILED, "environment_unavailable")
    await all_closed(counter, 1)


GOOD = {"server_name": "x", "url_path": "/mcp", "transport": "http", "headers": {}}


@pytest.mark.parametrize(
    ("offer", "code"),
    [
        (3, "seed_failed"),
        (GOOD | {"server_name": None}, "seed_failed"),
        (GOOD | {"transport": "sse"}, "seed_failed"),
        (GOOD | {"url_path": "@elsewhere/mcp"}, "seed_failed"),
        (GOOD | {"headers": {"a": 1}}, "seed_failed"),
        (GOOD, "environment_unreachable"),
    ],
)
async def test_an_offer_that_cannot_be_used_fails_the_attempt_and_its_session_is_closed(offer: Any, code: str):
    journal: list[str] = []
    app = FastAPI()

    @app.post("/{route}")
    async def any_route(route: str, request: Request) -> dict[str, Any]:
        journal.append(route)
        return {"mcp": offer, "supports_explicit_close": True} if route == "seed_session" else {}

    with serving(app) as url:
        policy = ScriptedPolicy(by_turn(says("done")))
        async with RemoteEnvironmentClient(url) as environment:
            rollout = await run_rollout(spec_of(bare_row()), policy, environment, rollout_config(), SAMPLING)
    assert (rollout.status, rollout.failure_code) == (Status.FAILED, code)
    assert (journal[0], journal[-1]) == ("seed_session", "close")
