"""Tools of a real MCP server in addition to an environment's own."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.types import CONNECTION_CLOSED, CallToolResult, ListToolsResult, TextContent
from mcp.types import Tool as McpTool

from roundhouse.config.environments import CustomEnvironment, MixtureEnvironment
from roundhouse.errors import ConfigError
from roundhouse.plugins.mcp.client import McpConnection, McpEnvironment
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient, open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.protocol import EnvironmentUnreachable
from roundhouse.trajectories.records import Status
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import (
    SAMPLING,
    ScriptedPolicy,
    by_turn,
    calls,
    rollout_config,
    says,
    serving,
    serving_counter,
    spec_of,
)
from tests.gym.spelling import Spelling
from tests.ports import free_port


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = MCPServer("library")

    @server.tool(description="Look a word up.")
    def define(word: str) -> str:
        if word == "unknown":
            raise ValueError("no such word")
        return f"{word} is a word"

    @server.tool(description="Add two numbers.")
    def plus(a: int, b: int) -> int:
        return a + b

    with serving(server.streamable_http_app()) as base:
        yield f"{base}/mcp"


def outputs(rollout) -> list[str]:
    return [item["output"] for item in rollout.items if item["type"] == "function_call_output"]


async def test_mcp_tools_are_shown_called_and_recorded_by_their_full_names_and_verified_by_their_own(url: str):
    shown: list[list[str]] = []

    class FakeWatchingPolicy(ScriptedPolicy):
        async def complete(self, messages, tools, sampling, seed):
            shown.append([tool["function"]["name"] for tool in tools])
            return await super().complete(messages, tools, sampling, seed)

    policy = FakeWatchingPolicy(
        by_turn(calls(("mcp__library__define", {"word": "rail"}), ("mcp__library__plus", {"a": 2, "b": 3})), says("ok"))
    )
    async with McpEnvironment(LocalEnvironmentClient(Spelling()), {"library": url}) as environment:
        rollout = await run_rollout(spec_of(), policy, environment, rollout_config(), SAMPLING)
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 1.0)
    assert outputs(rollout) == ["rail is a word", "5"]
    assert shown[0][-2:] == ["mcp__library__define", "mcp__library__plus"]
    names = [item["name"] for item in rollout.items if item["type"] == "function_call"]
    assert names == ["mcp__library__define", "mcp__library__plus"]
    assert rollout.task["responses_create_params"]["tools"][-1]["parameters"]["required"] == ["a", "b"]


@pytest.mark.parametrize(
    "call",
    [
        ("mcp__library__define", {"word": "unknown"}),
        ("mcp__library__define", {}),
        ("mcp__library__define", [1]),
        ("mcp__library__burn", {}),
        ("mcp__elsewhere__define", {}),
    ],
)
async def test_what_goes_wrong_with_an_mcp_tool_is_told_to_the_policy(url: str, call):
    policy = ScriptedPolicy(by_turn(calls(call), calls(("add", {"n": 1})), says("ok")))
    async with McpEnvironment(LocalEnvironmentClient(Counter()), {"library": url}) as environment:
        rollout = await run_rollout(spec_of(), policy, environment, rollout_config(), SAMPLING)
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 0.1)
    assert rollout.metrics["agent_tool_failures"] == 1


async def test_many_rollouts_share_a_server(url: str):
    policy = ScriptedPolicy(by_turn(calls(("mcp__library__define", {"word": "rail"})), says("ok")))
    specs = plan_rollouts([counter_row(f"t{index}") for index in range(40)], 1, seed=1, iteration=0)
    async with McpEnvironment(LocalEnvironmentClient(Spelling()), {"library": url}) as environment:
        rollouts = await collect(specs, policy, environment, rollout_config(concurrency=40), SAMPLING)
    assert {(rollout.status, rollout.reward) for rollout in rollouts} == {(Status.COMPLETED, 1.0)}


async def test_a_server_that_is_not_there_is_named_before_anything_runs():
    environment = McpEnvironment(LocalEnvironmentClient(Counter()), {"library": f"http://127.0.0.1:{free_port()}/mcp"})
    with pytest.raises(ConfigError, match=r"mcp_servers\.library is http://"):
        async with environment:
            pass


async def test_a_remote_environment_gets_mcp_tools_by_configuration(url: str, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(counter_row()))
    with serving_counter() as counter:
        config = RemoteEnvironment(kind="remote", url=counter, mcp_servers={"library": url}, train_tasks=str(tasks))
        async with open_environment(config) as environment:
            policy = ScriptedPolicy(
                by_turn(calls(("mcp__library__plus", {"a": 1, "b": 1}), ("add", {"n": 2})), says("ok"))
            )
            rollout = await run_rollout(spec_of(), policy, environment, rollout_config(), SAMPLING)
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 0.2)
    assert outputs(rollout)[0] == "2"


def spelling(url: str) -> CustomEnvironment:
    return CustomEnvironment(kind="custom", target="tests.gym.spelling:Spelling", mcp_servers={"library": url})


@pytest.mark.parametrize("mixed", [False, True])
async def test_an_environment_of_ones_own_gets_mcp_tools_by_configuration(url: str, mixed: bool):
    config = MixtureEnvironment(kind="mixture", environments={"mine": spelling(url)}) if mixed else spelling(url)
    policy = ScriptedPolicy(by_turn(calls(("mcp__library__define", {"word": "rail"})), says("ok")))
    async with open_environment(config) as environment:
        spec = spec_of(environment.tasks("train")[0])
        rollout = await run_rollout(spec, policy, environment, rollout_config(), SAMPLING)
    assert (rollout.status, rollout.reward) == (Status.COMPLETED, 1.0)
    assert outputs(rollout) == ["rail is a word"]


async def test_a_mixture_that_cannot_connect_to_one_server_leaves_no_connection_to_another(url: str):
    parts = {"mine": spelling(url), "lost": spelling(f"http://127.0.0.1:{free_port()}/mcp")}
    with pytest.raises(ConfigError, match=r"mcp_servers\.library is http://"):
        async with open_environment(MixtureEnvironment(kind="mixture", environments=parts)):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_world_of_ones_own_takes_no_mcp_servers():
    config = CustomEnvironment(
        kind="custom", target="tests.gym.worlds:Mountain", mcp_servers={"library": "http://127.0.0.1:9/mcp"}
    )
    with pytest.raises(ConfigError, match="mcp_servers is set, but mountain"):
        open_environment(config)


async def test_a_server_that_goes_away_fails_the_attempt_as_infrastructure():
    server = MCPServer("library")
    server.tool("one", description="One.")(lambda: 1)
    with serving(server.streamable_http_app()) as base:
        connection = await McpConnection.open("library", f"{base}/mcp")
    [name] = [schema["name"] for schema in connection.schemas]
    with pytest.raises(EnvironmentUnreachable, match="library"):
        await connection.call(name, {})
    await connection.close()
    with pytest.raises(EnvironmentUnreachable, match="has ended"):
        await connection.call(name, {})


@pytest.mark.parametrize("waiting", [1, 8])
async def test_a_server_that_was_away_is_used_again_by_the_rollouts_after_it_is_back(waiting: int):
    def library() -> Any:
        server = MCPServer("library")
        server.tool("one", description="One.")(lambda: 1)
        return server.streamable_http_app()

    port = free_port()
    environment = McpEnvironment(LocalEnvironmentClient(Counter()), {"library": f"http://127.0.0.1:{port}/mcp"})
    call = ("mcp__library__one", {})
    with serving(library(), port):
        await environment.__aenter__()
        earlier = await environment.seed_session(counter_row())
    with pytest.raises(EnvironmentUnreachable):
        await earlier.call_tool(*call)
    found = await asyncio.gather(
        *(environment.seed_session(counter_row()) for _ in range(waiting)), return_exceptions=True
    )
    assert {type(each) for each in found} == {EnvironmentUnreachable}, "it is still away"
    with serving(library(), port):
        sessions = await asyncio.gather(*(environment.seed_session(counter_row()) for _ in range(waiting)))
        assert [(await session.call_tool(*call)).text for session in sessions] == ["1"] * waiting
        with pytest.raises(EnvironmentUnreachable):
            await earlier.call_tool(*call)
    await environment.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("lists", [True, False])
async def test_a_server_that_says_connection_closed_of_one_call_ends_no_other_rollouts_calls(lists: bool):
    held, released, refused = threading.Event(), threading.Event(), threading.Event()

    async def list_tools(context, params) -> ListToolsResult:
        if refused.is_set() and not lists:
            refused.clear()
            raise MCPError(CONNECTION_CLOSED, "busy")
        return ListToolsResult(
            tools=[McpTool(name=name, input_schema={"type": "object"}) for name in ("hold", "refuse")]
        )

    async def call_tool(context, params) -> CallToolResult:
        if params.name == "refuse":
            refused.set()
            raise MCPError(CONNECTION_CLOSED, "busy")
        held.set()
        await asyncio.to_thread(released.wait, 10)
        return CallToolResult(content=[TextContent(type="text", text="1")])

    app = Server("library", on_list_tools=list_tools, on_call_tool=call_tool).streamable_http_app()
    hold = ("mcp__library__hold", {})
    with serving(app) as base:
        async with McpEnvironment(LocalEnvironmentClient(Counter()), {"library": f"{base}/mcp"}) as environment:
            first, second = [await environment.seed_session(counter_row()) for _ in range(2)]
            holding = asyncio.create_task(second.call_tool(*hold))
            await asyncio.to_thread(held.wait, 10)
            with pytest.raises(EnvironmentUnreachable, match="busy"):
                await first.call_tool("mcp__library__refuse", {})
            third = await environment.seed_session(counter_row())
            released.set()
            assert (await holding).text == "1"
            assert [(await each.call_tool(*hold)).text for each in (first, second, third)] == ["1"] * 3
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_world_that_answers_its_own_calls_takes_no_mcp_servers():
    with pytest.raises(ValueError, match=r"environment\.mcp_servers is set"):
        RemoteEnvironment(
            kind="remote", url="http://h:1", protocol="gymnasium", mcp_servers={"a": "http://h:2"}, train_tasks="x"
        )
