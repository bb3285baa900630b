"""A session is closed when its rollout ends in any way, and closing changes no outcome."""

import asyncio
import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

import roundhouse.http.sessions
import roundhouse.rollout.agents
from roundhouse.environments.base import Environment, Verdict, tool
from roundhouse.generation.protocol import EngineUnreachable
from roundhouse.http.sessions import SessionStore
from roundhouse.plugins.nemo_gym.clients.resources import RemoteEnvironmentClient
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.agents import run_rollout
from roundhouse.rollout.clients import LocalEnvironmentClient, open_environment
from roundhouse.rollout.plan import plan_rollouts
from roundhouse.rollout.protocol import ToolEnvironment
from roundhouse.rollout.responses import response_object
from roundhouse.trajectories.records import Status
from tests.gym.collecting import collect
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import (
    SAMPLING,
    Reply,
    ScriptedPolicy,
    all_closed,
    by_turn,
    calls,
    rollout_config,
    says,
    serving,
    spec_of,
)
from tests.gym.worlds import Mountain, climb_row

RESPONSE = response_object("resp_1", [], model="policy", created_at=0.0)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Counter, ToolEnvironment]]:
    counter = Counter()
    if request.param == "local":
        yield counter, LocalEnvironmentClient(counter)
    else:
        with serving(build_app(counter)) as url:
            yield counter, RemoteEnvironmentClient(url)


class FakeNeverAnswering(ScriptedPolicy):
    """Signals when the collection's ten calls wait for it, in addition to the one of the previous rollout."""

    def __init__(self) -> None:
        super().__init__(by_turn(says("late")), seconds=3600)
        self.all_waiting = asyncio.Event()

    async def complete(self, messages, tools, sampling, seed):
        if len(self.seeds) == 10:
            self.all_waiting.set()
        return await super().complete(messages, tools, sampling, seed)


@pytest.mark.parametrize(
    ("reply", "row", "status"),
    [
        (says("done"), {}, Status.COMPLETED),
        (says("and", "length"), {}, Status.TRUNCATED),
        (says("done"), {"verdict": "mask"}, Status.MASKED),
        (says("done"), {"verdict": "raises"}, Status.FAILED),
        (says("done"), {"verdict": "infra"}, Status.FAILED),
        (calls(("crash", {})), {}, Status.FAILED),
        (calls(("hang", {})), {}, Status.FAILED),
        (EngineUnreachable("gone"), {}, Status.FAILED),
        (KeyError("defect"), {}, Status.FAILED),
    ],
)
async def test_however_a_rollout_ends_its_session_is_closed_once(
    place, reply: Reply, row: dict[str, Any], status: Status
):
    counter, client = place
    async with client:
        rollout = await run_rollout(
            spec_of(counter_row(**row)),
            ScriptedPolicy(by_turn(reply)),
            client,
            rollout_config(tool_timeout_seconds=0.1),
            SAMPLING,
        )
        assert rollout.status is status
        await all_closed(counter, 1)


async def test_a_rollout_that_ran_out_of_time_and_one_that_was_cancelled_are_closed(place):
    counter, client = place
    async with client:
        never = FakeNeverAnswering()
        late = await run_rollout(spec_of(), never, client, rollout_config(timeout_seconds=0.1), SAMPLING)
        assert late.failure_code == "rollout_timeout"
        await all_closed(counter, 1)
        specs = plan_rollouts([counter_row(f"t{index}") for index in range(10)], 1, seed=1, iteration=0)
        collection = asyncio.create_task(collect(specs, never, client, rollout_config(concurrency=10), SAMPLING))
        async with asyncio.timeout(10):
            await never.all_waiting.wait()
        collection.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collection
        await all_closed(counter, 11)


@pytest.mark.parametrize("owner", ["cannot close", "closes for ever"])
async def test_a_session_that_cannot_be_closed_changes_nothing(place, owner: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roundhouse.rollout.agents, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(roundhouse.http.sessions, "CLOSE_SECONDS", 0.1)
    counter, client = place
    async with client:
        rollout = await run_rollout(
            spec_of(counter_row(owner)), ScriptedPolicy(by_turn(says("x"))), client, rollout_config(), SAMPLING
        )
        await all_closed(counter, 1)
    assert (rollout.status, rollout.failure_detail) == (Status.COMPLETED, "")


# -- servers --------------------------------------------------------------------------------------------------------


def foreign(seeded: Any, journal: list[str]) -> FastAPI:
    app = FastAPI()

    @app.post("/{route}")
    async def any_route(route: str, request: Request) -> Response:
        journal.append(f"{route} {request.headers.get('cookie', '-')}")
        answers = {"seed_session": seeded, "verify": {"reward": 1.0}}
        answer = Response(httpx.Request("POST", "http://x", json=answers.get(route, {})).content)
        answer.set_cookie("Foreign___x", "opaque")
        return answer

    return app


@pytest.mark.parametrize(
    ("seeded", "options", "closing"),
    [
        ({}, {}, []),
        ({"supports_explicit_close": True}, {}, ["close Foreign___x=opaque"]),
        ({"info": {"supports_explicit_close": True}}, {}, ["close Foreign___x=opaque"]),
        ({"supports_explicit_close": "yes"}, {}, []),
        ([3], {}, []),
        ({}, {"close_route": "/end_session"}, ["end_session Foreign___x=opaque"]),
    ],
)
async def test_a_foreign_server_is_asked_to_close_only_where_it_offers_that(seeded, options, closing):
    journal: list[str] = []
    with serving(foreign(seeded, journal)) as url:
        async with RemoteEnvironmentClient(url, **options) as client:
            policy = ScriptedPolicy(by_turn(calls(("close", {})), says("x")))
            rollout = await run_rollout(spec_of(), policy, client, rollout_config(), SAMPLING)
    assert rollout.status is Status.COMPLETED
    tool = [] if closing == ["close Foreign___x=opaque"] else ["close Foreign___x=opaque"]
    assert journal[1:] == [*tool, "verify Foreign___x=opaque", *closing], "only an unoffered close is a tool's name"


async def test_a_foreign_servers_route_to_close_can_be_configured(tmp_path):
    rows, journal = tmp_path / "rows.jsonl", list[str]()
    rows.write_text(json.dumps(counter_row()) + "\n")
    with serving(foreign({}, journal)) as url:
        config = RemoteEnvironment(kind="remote", url=url, close_route="/end_session", train_tasks=str(rows))
        async with open_environment(config) as client:
            await run_rollout(spec_of(), ScriptedPolicy(by_turn(says("x"))), client, rollout_config(), SAMPLING)
    assert journal[-1] == "end_session Foreign___x=opaque"


async def test_a_server_gives_sessions_back_when_they_are_closed_unused_or_no_longer_needed():
    counter = Counter()
    app = build_app(counter, sessions=SessionStore(capacity=2, idle_seconds=0.3))
    with serving(app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            for owner in ("closed", "verified", "makes room", "left alone"):
                client.cookies.clear()
                await client.post("/seed_session", json=counter_row(owner))
                if owner == "closed":
                    assert (await client.post("/close", json={})).json() == {}
                    assert (await client.post("/total", json={})).status_code == 503
                if owner == "verified":
                    await client.post("/verify", json=counter_row(owner) | {"response": RESPONSE})
                    await client.post("/verify", json=counter_row(owner) | {"response": RESPONSE})
                    assert counter.accounts[1].closed == 0, "its verdict may be asked for again"
            await all_closed(counter, 4)


def test_a_server_that_stops_gives_everything_back():
    counter = Counter()
    with serving(build_app(counter)) as url:
        for index in range(3):
            httpx.post(f"{url}/seed_session", json=counter_row(f"{index}"))
    assert [account.closed for account in counter.accounts] == [1, 1, 1]


def test_a_verdict_that_is_the_sessions_last_use_closes_it():
    counter = Counter()
    with serving(build_app(counter)) as url, httpx.Client(base_url=url) as client:
        client.post("/seed_session", json=counter_row())
        headers = {"X-Roundhouse-Session": "last-use"}
        told = client.post("/verify", json=counter_row() | {"response": RESPONSE}, headers=headers)
        assert (told.json()["reward"], told.headers["x-roundhouse-session"]) == (0.0, "closed")
        assert client.post("/total", json={}).status_code == 503


def test_a_tool_named_close_stays_a_tool():
    class Door(Environment):
        name = "door"

        def tasks(self, split):
            return []

        async def seed_session(self, row):
            return ["open"]

        @tool("Close the door.")
        async def close(self, session) -> str:
            session.append("closed")
            return "closed"

        async def verify(self, session, row, response):
            return Verdict(float(session[-1] == "closed"))

    with serving(build_app(Door())) as url, httpx.Client(base_url=url) as client:
        assert client.post("/seed_session", json=counter_row()).json() == {}
        assert client.post("/close", json={}).text == "closed"
        assert client.post("/verify", json=counter_row() | {"response": RESPONSE}).json()["reward"] == 1.0


class Excavation(Environment):
    """Digs until it is stopped; records the order of ends."""

    name = "excavation"

    def __init__(self) -> None:
        self.journal: queue.SimpleQueue[str] = queue.SimpleQueue()

    def tasks(self, split):
        return []

    async def seed_session(self, row):
        return self.journal

    @tool("Dig for ever.")
    async def dig(self, session) -> str:
        session.put("digging")
        try:
            await asyncio.sleep(3600)
        finally:
            session.put("stopped")
        return ""

    async def verify(self, session, row, response):
        return Verdict(1.0)

    async def close_session(self, session):
        session.put("closed")


async def test_a_tool_that_still_runs_when_its_session_closes_is_cancelled_before_the_session_is_given_back():
    excavation = Excavation()
    with serving(build_app(excavation)) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            await client.post("/seed_session", json=counter_row())
            digging = asyncio.create_task(client.post("/dig", json={}))
            seen = [await asyncio.to_thread(excavation.journal.get, timeout=10)]
            await client.post("/close", json={})
            told = await digging
            seen += [await asyncio.to_thread(excavation.journal.get, timeout=10) for _ in range(2)]
    assert seen == ["digging", "stopped", "closed"]
    assert (told.status_code, told.headers["x-roundhouse-failure"]) == (503, "infra")
    assert told.json().startswith("SessionEnded(")


async def test_a_step_that_still_runs_when_its_episode_closes_is_cancelled():
    begun = asyncio.Event()

    class Glacier(Mountain):
        async def step(self, state, response):
            loop.call_soon_threadsafe(begun.set)
            return await super().step(state, response)

    loop, mountain = asyncio.get_running_loop(), Glacier()
    with serving(build_app(mountain)) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            for request_id in (None, "once"):
                await client.post("/reset", json=climb_row(plan="hang"))
                body = climb_row() | {"response": RESPONSE, "_ng_step_request_id": request_id}
                step = asyncio.create_task(client.post("/step", json=body))
                async with asyncio.timeout(10):
                    await begun.wait()
                    begun.clear()
                    await client.post("/close", json={})
                    told = await step
                assert told.status_code == 503
                assert told.json().startswith("SessionEnded(")
