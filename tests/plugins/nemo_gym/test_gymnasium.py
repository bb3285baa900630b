"""The Gymnasium protocol over HTTP, and against a server written from the contract alone."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from roundhouse.environments.base import TaskRow
from roundhouse.http.sessions import SessionStore
from roundhouse.plugins.nemo_gym.clients.resources import RemoteEpisodeClient
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEpisodeClient, open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.responses import response_object
from roundhouse.trajectories.records import Rollout, Status
from tests import fork_server
from tests.gym.collecting import collect
from tests.gym.kinds import needs
from tests.gym.playground import (
    SAMPLING,
    Reply,
    ScriptedPolicy,
    by_turn,
    calls,
    comparable,
    rollout_config,
    says,
    serving,
    spec_of,
)
from tests.gym.worlds import Mountain, climb_row
from tests.ports import free_port

# -- both homes -----------------------------------------------------------------------------------------------------


def anything(messages: list[dict[str, Any]], seed: int) -> Reply:
    draw = random.Random(seed)
    return draw.choice([says(str(draw.randint(0, 3))), says("up", "length"), calls(("look", {}), ("look", "no json"))])


async def test_the_same_episodes_in_process_and_over_http(tmp_path):
    rows = [climb_row(f"task {index}", top=1 + index % 7) for index in range(20)] + [climb_row("quiet", plan="silent")]
    specs = plan_rollouts(rows, 3, seed=1, iteration=0)
    config = rollout_config(max_turns=6, concurrency=16)
    local = await collect(specs, ScriptedPolicy(anything), LocalEpisodeClient(Mountain()), config, SAMPLING)
    served = Mountain()
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps(row) for row in rows))
    with serving(build_app(served)) as url:
        remote = RemoteEnvironment(kind="remote", url=url, protocol="gymnasium", train_tasks=str(tasks))
        async with open_environment(remote) as client:
            over_http = await collect(specs, ScriptedPolicy(anything), client, config, SAMPLING)
    assert [comparable(rollout) for rollout in local] == [comparable(rollout) for rollout in over_http]
    assert {rollout.status for rollout in local} == {Status.COMPLETED, Status.TRUNCATED}
    assert [climb.closed for climb in served.climbs] == [1] * len(specs)


# -- our server, by the contract ------------------------------------------------------------------------------------


@pytest.fixture
def world() -> Mountain:
    return Mountain()


@pytest.fixture
def client(world: Mountain) -> Iterator[httpx.Client]:
    with serving(build_app(world)) as url, httpx.Client(base_url=url) as client:
        yield client


def acting(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    return response_object("resp_1", [message], model="policy", created_at=0.0)


def test_reset_step_and_close_answer_as_the_contract_says(client: httpx.Client, world: Mountain):
    begun = client.post("/reset", json=climb_row(top=3)).json()
    assert begun == {
        "observation": "The top is at 3.",
        "info": {"supports_explicit_close": True, "supports_step_idempotency": True},
    }
    step = client.post("/step", json=climb_row() | {"response": acting("1")})
    assert step.json() == {
        "observation": "You are at 1.",
        "reward": 0.1,
        "terminated": False,
        "truncated": False,
        "info": {"height": 1.0},
    }
    assert step.headers["set-cookie"].startswith("Mountain___mountain=")
    assert client.post("/verify", json={}).status_code == 404
    assert client.post("/close", json={}).json() == {}
    assert client.post("/close", json={}).json() == {}, "closing again is harmless"
    gone = client.post("/step", json=climb_row() | {"response": acting("1")})
    assert (gone.status_code, gone.headers["x-roundhouse-failure"]) == (503, "infra")
    assert [climb.closed for climb in world.climbs] == [1]


def test_a_step_under_the_same_request_id_is_played_once(client: httpx.Client, world: Mountain):
    client.post("/reset", json=climb_row(top=9))
    body = climb_row() | {"response": acting("1")}
    first = client.post("/step", json=body | {"_ng_step_request_id": "a"}).json()
    assert client.post("/step", json=body | {"_ng_step_request_id": "a"}).json() == first
    assert client.post("/step", json=body | {"_ng_step_request_id": "b"}).json()["observation"] == "You are at 2."
    assert world.climbs[0].steps == 2


def test_a_reset_without_the_row_is_refused_in_fastapis_shape(client: httpx.Client):
    refused = client.post("/reset", json={"top": 3})
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["body", "responses_create_params"])


def test_a_world_adds_metrics_of_its_own_here_and_over_http():
    class Measured(Mountain):
        def compute_metrics(self, tasks):
            return {"summits": sum(rollout["reward"] >= 0.3 for task in tasks for rollout in task)}

    rows = [{"_ng_task_index": 0, "reward": reward} for reward in (0.3, 0.1, 0.4)]
    with serving(build_app(Measured())) as url:
        told = httpx.post(f"{url}/aggregate_metrics", json={"verify_responses": rows}).json()
    assert told["agent_metrics"]["summits"] == 2
    assert LocalEpisodeClient(Measured()).compute_metrics([rows]) == {"summits": 2}


def test_aggregate_metrics_are_there(client: httpx.Client):
    rows = [{"_ng_task_index": 0, "reward": 1.0}, {"_ng_task_index": 0, "reward": 0.0}]
    assert (
        client.post("/aggregate_metrics", json={"verify_responses": rows}).json()["agent_metrics"]["mean/reward"] == 0.5
    )


def test_an_episode_that_is_over_makes_room_and_is_given_back():
    world = Mountain()
    app = build_app(world, sessions=SessionStore(capacity=1))
    with serving(app) as url, httpx.Client(base_url=url) as first, httpx.Client(base_url=url) as second:
        first.post("/reset", json=climb_row(top=1))
        assert second.post("/reset", json=climb_row()).status_code == 503
        assert first.post("/step", json=climb_row() | {"response": acting("1")}).json()["terminated"] is True
        assert second.post("/reset", json=climb_row()).status_code == 200
    assert [climb.closed for climb in world.climbs] == [1, 1], "the second when the server stopped"


# -- a server written from the contract alone -----------------------------------------------------------------------


def foreign(journal: list[Any]) -> FastAPI:
    """A world of two steps; the row controls its offers and failures."""
    app = FastAPI()

    @app.post("/reset")
    async def reset(request: Request) -> Response:
        row = await request.json()
        journal.append(("reset", row["task_id"]))
        answer = Response(json.dumps(row["reset"]))
        answer.set_cookie("Foreign___world", "opaque")
        return answer

    @app.post("/step")
    async def step(request: Request) -> Any:
        body = await request.json()
        journal.append(("step", body.get("_ng_step_request_id"), request.headers["cookie"]))
        over = sum(entry[0] == "step" for entry in journal) >= 2
        return body.get("step") or {
            "observation": None,
            "reward": 0.5,
            "terminated": over,
            "truncated": False,
            "info": {"tool_outputs": [{"call_id": "call_0", "output": {"seen": 1}}], "result": "bust", "value": 22},
        }

    @app.post("/close")
    async def close(request: Request) -> dict[str, Any]:
        journal.append(("close", await request.json(), request.headers["cookie"]))
        return {}

    return app


async def on_foreign(row: TaskRow, *replies: Reply, **options: Any) -> tuple[Rollout, list[Any]]:
    journal: list[Any] = []
    with serving(foreign(journal)) as url:
        async with RemoteEpisodeClient(url, **options) as client:
            policy = ScriptedPolicy(by_turn(*(replies or (says("1"),))))
            rollout = await run_rollout(spec_of(row), policy, client, rollout_config(), SAMPLING)
    return rollout, journal


async def test_a_foreign_world_is_played_and_closed_only_where_it_offers_that():
    row = climb_row(reset={"observation": None, "info": {}})
    rollout, journal = await on_foreign(row, calls(("look", {})), says("1"))
    assert (rollout.status, rollout.reward, rollout.metrics) == (
        Status.COMPLETED,
        1.0,
        {"agent_steps": 2.0, "value": 22},
    )
    assert [entry[0] for entry in journal] == ["reset", "step", "step"]
    assert journal[1] == ("step", None, "Foreign___world=opaque")
    assert '{"seen":1}' in [item.get("output") for item in rollout.items]
    offered = climb_row(reset={"observation": "go", "info": {"supports_explicit_close": True}})
    _, journal = await on_foreign(offered)
    assert journal[-1] == ("close", {}, "Foreign___world=opaque")


async def test_steps_carry_an_id_of_their_own_where_the_world_understands_it():
    row = climb_row(reset={"observation": "go", "info": {"supports_step_idempotency": True}})
    _, journal = await on_foreign(row)
    ids = [entry[1] for entry in journal if entry[0] == "step"]
    assert len(set(ids)) == 2
    assert None not in ids


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"reset": [], "step": None}, "step_failed"),
        ({"reset": {"observation": 3, "info": {"supports_explicit_close": True}}}, "step_failed"),
        ({"reset": {}, "step": {"observation": None, "terminated": True}}, "step_failed"),
        ({"reset": {}, "step": {"observation": None, "reward": None}}, "bad_reward"),
        ({"reset": {}, "step": {"reward": 0.0, "info": {"tool_outputs": [3]}}}, "step_failed"),
        ({"reset": {}, "step": {"reward": 0.0, "_ng_failure_class": "judge_failed"}}, "judge_failed"),
    ],
)
async def test_answers_that_are_none_fail_the_rollout(row, code):
    rollout, journal = await on_foreign(climb_row(**row))
    assert (rollout.status, rollout.failure_code, rollout.reward) == (Status.FAILED, code, None)
    if "info" in row["reset"]:
        assert journal[-1][0] == "close", "a session that began is closed although its answer was malformed"


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_step_whose_answer_was_lost_is_asked_again_only_where_that_is_harmless(idempotent: bool):
    ids: list[str | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        answer: dict[str, Any] = {"observation": "go", "info": {"supports_step_idempotency": idempotent}}
        if head.startswith("POST /step"):
            ids.append(body.get("_ng_step_request_id"))
            answer = {"observation": None, "reward": 1.0, "terminated": True}
        if len(ids) != 1:  # the answer to the first step is lost
            text = json.dumps(answer)
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, RemoteEpisodeClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        rollout = await run_rollout(
            spec_of(climb_row()), ScriptedPolicy(by_turn(says("1"))), client, rollout_config(), SAMPLING
        )
    if idempotent:
        assert (rollout.status, len(ids), len(set(ids))) == (Status.COMPLETED, 2, 1)
    else:
        assert (rollout.failure_code, ids) == ("environment_unreachable", [None])


@needs("frozen_lake")
def test_the_command_serves_a_world_as_well() -> None:
    """It ended with a NameError: the module ran before the half of it that serves worlds was defined."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "roundhouse.plugins.nemo_gym.servers.resources", "--environment", "frozen_lake"]
    with fork_server.start([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            while True:
                assert server.poll() is None, server.stderr.read()
                with contextlib.suppress(httpx.HTTPError):
                    assert httpx.get(url, timeout=60).json() == {"status": "ok"}
                    break
                time.sleep(0.1)
        finally:
            server.terminate()
