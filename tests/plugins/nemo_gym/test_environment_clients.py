"""In process and over HTTP: the same rollouts, the same failures. And what only HTTP can do to a rollout."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError

from roundhouse.environments import Calculator
from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.clients.resources import RemoteEnvironmentClient
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient, open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.protocol import EnvironmentTimeout, EnvironmentUnavailable
from roundhouse.rollout.responses import response_object
from roundhouse.trajectories.records import FailureKind, Ledger, Status
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import (
    SAMPLING,
    Reply,
    ScriptedPolicy,
    anything,
    by_turn,
    calls,
    comparable,
    rollout_config,
    says,
    serving,
    serving_counter,
    spec_of,
    turns_of,
)
from tests.ports import free_port

RESPONSE = response_object("resp_1", [], model="policy", created_at=0.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_counter() as url:
        yield url


async def test_the_same_rollouts_in_process_and_over_http(url: str):
    rows = [counter_row(f"task {index}") for index in range(25)]
    rows += [counter_row("masked", verdict="mask")]
    specs = plan_rollouts(rows, 4, seed=1, iteration=0)
    config = rollout_config(max_turns=4, concurrency=16)
    local = await collect(specs, ScriptedPolicy(anything), LocalEnvironmentClient(Counter()), config, SAMPLING)
    async with RemoteEnvironmentClient(url) as remote:
        over_http = await collect(specs, ScriptedPolicy(anything), remote, config, SAMPLING)
    assert [comparable(rollout) for rollout in local] == [comparable(rollout) for rollout in over_http]
    assert {rollout.status for rollout in local} == {Status.COMPLETED, Status.TRUNCATED, Status.MASKED}


@pytest.mark.parametrize(
    ("row", "reply", "code", "kind"),
    [
        ({"verdict": "raises"}, says("x"), "verifier_failed", FailureKind.DATA),
        ({"verdict": "nan"}, says("x"), "bad_reward", FailureKind.DATA),
        ({"verdict": "bool"}, says("x"), "bad_reward", FailureKind.DATA),
        ({"verdict": "text"}, says("x"), "bad_reward", FailureKind.DATA),
        ({"verdict": "wrong sum"}, says("x"), "bad_reward", FailureKind.DATA),
        ({"seed": "raises"}, says("x"), "seed_failed", FailureKind.DATA),
        ({"verdict": "infra"}, says("x"), "environment_unavailable", FailureKind.INFRA),
        ({"seed": "infra"}, says("x"), "environment_unavailable", FailureKind.INFRA),
        ({}, calls(("crash", {})), "environment_unavailable", FailureKind.INFRA),
        ({}, calls(("hang", {})), "tool_timeout", FailureKind.INFRA),
    ],
)
async def test_failures_over_http_have_the_kind_they_have_in_process(url: str, row, reply, code, kind):
    spec, policy, config = (
        spec_of(counter_row(**row)),
        ScriptedPolicy(by_turn(reply)),
        rollout_config(tool_timeout_seconds=0.3),
    )
    async with RemoteEnvironmentClient(url) as remote:
        rollout = await run_rollout(spec, policy, remote, config, SAMPLING)
    local = await run_rollout(spec, policy, LocalEnvironmentClient(Counter()), config, SAMPLING)
    assert (rollout.status, rollout.failure_code, rollout.failure_kind, rollout.reward) == (
        Status.FAILED,
        code,
        kind,
        None,
    )
    assert (local.status, local.failure_kind, local.reward) == (Status.FAILED, kind, None)


@pytest.mark.parametrize("where", ["local", "remote"])
async def test_parallel_rollouts_of_one_task_never_share_a_session(url: str, where: str):
    environment = LocalEnvironmentClient(Counter()) if where == "local" else RemoteEnvironmentClient(url)
    async with environment:
        sessions = [await environment.seed_session(counter_row("same")) for _ in range(16)]

        async def add(index: int) -> str:
            for _ in range(5):
                await sessions[index].call_tool("add", {"n": index})
            return (await sessions[index].call_tool("total", {})).text

        totals = await asyncio.gather(*(add(index) for index in range(16)))
    assert totals == [f"{5 * index} für same" for index in range(16)]


async def test_a_server_that_is_not_there_is_an_infrastructure_failure():
    async with RemoteEnvironmentClient(f"http://127.0.0.1:{free_port()}") as remote:
        rollout = await run_rollout(spec_of(), ScriptedPolicy(by_turn(says("x"))), remote, rollout_config(), SAMPLING)
    assert (rollout.failure_kind, rollout.failure_code) == (FailureKind.INFRA, "environment_unreachable")


async def test_a_server_that_accepts_and_never_answers_meets_a_time_limit():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with RemoteEnvironmentClient(url, request_seconds=0.1) as remote:
            with pytest.raises(EnvironmentTimeout, match=r"within 0\.1 s"):
                await remote.seed_session(counter_row())


def foreign_server() -> FastAPI:
    """Sets its cookies piecemeal, answers tools with odd bodies, gives verdicts the way NeMo Gym's environments do."""
    app = FastAPI()

    @app.post("/seed_session")
    async def seed(request: Request) -> Response:
        answer = Response("{}")
        answer.set_cookie("Foreign___a", 'opaque=/+.~"x', path="/")
        answer.set_cookie("proxy", "first")
        return answer

    @app.post("/look")
    async def look(request: Request) -> Response:
        answer = Response(request.headers["cookie"], 418)
        answer.set_cookie("proxy", "second")
        return answer

    @app.post("/verify")
    async def verify(request: Request) -> dict[str, Any]:
        body = await request.json()
        body.pop("cookies", None)
        return body | body["verdict"]

    return app


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with serving(foreign_server()) as url:
        yield url


async def test_cookies_are_merged_and_sent_back_as_they_came(foreign: str):
    async with RemoteEnvironmentClient(foreign) as remote:
        session = await remote.seed_session(counter_row())
        first = await session.call_tool("look", {})
        second = await session.call_tool("look", {})
    assert first.status == 418, "the body of any status is the tool's output"
    before, after = first.text.split("; "), second.text.split("; ")
    assert before[0] == after[0]
    assert before[0].startswith("Foreign___a=")
    assert (before[1], after[1]) == ("proxy=first", "proxy=second")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"reward": 1}, (1, {}, {}, False)),
        (
            {"reward": 0.5, "accuracy": 0.5, "solved": True, "note": "x"},
            (0.5, {}, {"accuracy": 0.5, "solved": True}, False),
        ),
        ({"reward": 1.0, "reward_components": {"a": 1.0}, "mask_sample": True}, (1.0, {"a": 1.0}, {}, True)),
    ],
)
async def test_foreign_verdicts_are_understood(foreign: str, reply: dict[str, Any], expected: tuple[Any, ...]):
    async with RemoteEnvironmentClient(foreign) as remote:
        session = await remote.seed_session(counter_row(verdict=reply, expected=3))
        verdict = await session.verify(RESPONSE)
    assert (verdict.reward, verdict.reward_components, verdict.metrics, verdict.mask) == expected


@pytest.mark.parametrize(
    ("reply", "code", "kind"),
    [
        ({"reward": 0.0, "_ng_failure_class": "judge_failed"}, "judge_failed", FailureKind.INFRA),
        (
            {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_terminal": True},
            "verifier_failed",
            FailureKind.DATA,
        ),
        ({}, "verifier_failed", FailureKind.DATA),
        ({"reward": None}, "bad_reward", FailureKind.DATA),
        ({"reward": 1.0, "mask_sample": "false"}, "verifier_failed", FailureKind.DATA),
    ],
)
async def test_a_failure_mark_beside_a_zero_reward_is_a_failure(foreign: str, reply, code, kind):
    async with RemoteEnvironmentClient(foreign) as remote:
        spec, policy = spec_of(counter_row(verdict=reply)), ScriptedPolicy(by_turn(says("x")))
        rollout = await run_rollout(spec, policy, remote, rollout_config(), SAMPLING)
    assert (rollout.failure_code, rollout.failure_kind, rollout.reward) == (code, kind, None)


async def test_an_answer_that_is_no_json_is_no_verdict(foreign: str):
    async with RemoteEnvironmentClient(f"{foreign}/nowhere") as remote:
        with pytest.raises(Exception, match="seed_session answered 404"):
            await remote.seed_session(counter_row())
    async with RemoteEnvironmentClient(foreign) as remote:
        session = await remote.seed_session(counter_row(verdict=[]))
        with pytest.raises(EnvironmentUnavailable, match="verify answered 500"):  # a 5xx may pass: not the row's fault
            await session.verify(RESPONSE)


@pytest.mark.parametrize("where", ["local", "remote"])
async def test_the_right_procedure_on_the_calculator_is_rewarded_wherever_it_runs(where: str):
    calculator = Calculator()
    row = calculator.tasks("train")[0]
    expression = row["task_id"].removeprefix("calculator/")
    product, addend = expression.split("+")

    def right(messages: list[dict[str, Any]], seed: int) -> Reply:
        told = messages[-1]["content"]
        if turns_of(messages) == 2:
            return says(f"The answer is {told}.")
        return calls(("calculate", {"expression": f"{told}+{addend}" if turns_of(messages) else product}))

    with serving(build_app(calculator)) as url:
        async with (
            LocalEnvironmentClient(calculator) if where == "local" else RemoteEnvironmentClient(url) as environment
        ):
            rollout = await run_rollout(spec_of(row), ScriptedPolicy(right), environment, rollout_config(), SAMPLING)
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.COMPLETED, 1.0, 3)
    assert rollout.metrics["tool_calls"] == rollout.metrics["agent_tool_calls"] == 2


async def test_a_remote_environment_opens_with_the_task_rows_of_its_files(url: str, tmp_path):
    rows = [counter_row("first"), {"responses_create_params": {"input": "x"}}]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    config = RemoteEnvironment(kind="remote", url=url, train_tasks=str(tasks), heldout_tasks=f"file://{tasks}")
    async with open_environment(config) as environment:
        assert [row["task_id"] for row in environment.tasks("train")] == ["first", "line-2"]
        assert environment.tasks("heldout") == environment.tasks("train")
        session = await environment.seed_session(environment.tasks("train")[0])
        assert (await session.call_tool("total", {})).text == "0 für first"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "holds no task rows"),
        ("{", "line 1 is not JSON"),
        ('{"responses_create_params": {"input": "x"}}\n[1]', "line 2 is a list; a task row is a JSON object"),
        ('{"responses_create_params": {}}', "needs responses_create_params.input"),
        (
            '{"task_id": "a", "responses_create_params": {"input": "x"}}\n' * 2,
            "line 2: task_id 'a' is already used on line 1",
        ),
    ],
)
def test_a_task_file_at_fault_is_named_with_its_line(tmp_path, content: str | None, message: str):
    tasks = tmp_path / "tasks.jsonl"
    if content is not None:
        tasks.write_text(content)
    with pytest.raises(ConfigError, match=r"environment\.train_tasks.*tasks\.jsonl") as refused:
        open_environment(RemoteEnvironment(kind="remote", url="http://localhost:1", train_tasks=str(tasks)))
    assert message in str(refused.value)


def test_a_url_without_a_scheme_is_refused():
    with pytest.raises(ConfigError, match=r"environment\.url is 'localhost:8001'"):
        RemoteEnvironmentClient("localhost:8001")


async def test_an_environment_that_is_gone_for_all_ends_in_failures_within_bounded_time():
    policy, begun = ScriptedPolicy(by_turn(says("x"))), time.monotonic()
    specs = plan_rollouts([counter_row(f"task {index}") for index in range(300)], 1, seed=1, iteration=0)
    async with RemoteEnvironmentClient(f"http://127.0.0.1:{free_port()}") as environment:
        rollouts = await collect(specs, policy, environment, rollout_config(concurrency=16), SAMPLING)
    assert Ledger.from_rollouts(rollouts, requested=300).failures == {"environment_unreachable": 300}
    assert policy.seeds == []
    assert time.monotonic() - begun < 20


def test_a_server_whose_calls_others_see_cannot_be_called_repeatable() -> None:
    fields = {"kind": "remote", "url": "http://x:1", "train_tasks": "t", "restore": "replay"}
    assert RemoteEnvironment(**fields).restore == "replay"
    with pytest.raises(ValidationError, match=r"environment\.restore is replay, but environment\.mcp_servers is set"):
        RemoteEnvironment(**fields, mcp_servers={"files": "http://x:2/mcp"})
