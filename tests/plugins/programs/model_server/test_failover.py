"""Several engines: spread, stay, move on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from tests.plugins.programs.model_server.conftest import Served
from tests.plugins.programs.model_server.fake_engine import FakeEngine, serving
from tests.ports import free_port
from tests.waiting import until

BODY = {"input": "x"}


def states(client: httpx.Client) -> list[str]:
    return [engine["state"] for engine in client.get("/health").json()["engines"]]


def test_a_dead_engine_is_taken_out_and_the_rollouts_move_on(served: Served):
    """The first engine refuses connections from the beginning; no call notices."""
    alive = FakeEngine()
    client = served(f"http://127.0.0.1:{free_port()}", alive)
    for _ in range(6):
        client.cookies.clear()
        assert client.post("/v1/responses", json=BODY).status_code == 200
    assert len(alive.requests) == 6
    assert states(client) == ["out", "in"]


def test_an_engine_that_dies_in_the_middle_of_a_rollout_hands_it_over(served: Served):
    other = FakeEngine()
    client: httpx.Client
    with serving(FakeEngine()) as dying:
        client = served(dying, other)
        first = client.post("/v1/responses", json=BODY)
        assert (first.status_code, len(other.requests)) == (200, 0)
    for _ in range(3):
        assert client.post("/v1/responses", json=BODY).status_code == 200
    assert len(other.requests) == 3


def test_an_engine_that_says_unavailable_is_left_and_a_session_does_not_go_back(served: Served):
    down = True
    flaky = FakeEngine(fault=lambda body: (503, b"refitting") if down else None)
    steady = FakeEngine()
    client = served(flaky, steady, health_check_seconds=0.1)
    assert client.post("/v1/responses", json=BODY).status_code == 200
    assert (len(flaky.requests), len(steady.requests)) == (1, 1)
    down = False
    time.sleep(0.6)
    assert states(client) == ["in", "in"]
    assert client.post("/v1/responses", json=BODY).status_code == 200
    assert len(flaky.requests) == 1
    client.cookies.clear()
    assert client.post("/v1/responses", json=BODY).status_code == 200
    assert len(flaky.requests) == 2


def test_with_all_engines_down_the_answer_is_503_in_bounded_time_and_says_why(served: Served):
    client = served(
        *(f"http://127.0.0.1:{free_port()}" for _ in range(2)),
        outage_wait_seconds=0.4,
        api_key="sk-secret",
    )
    begun = time.monotonic()
    reply = client.post("/v1/responses", json=BODY)
    assert time.monotonic() - begun < 5
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engines_unreachable")
    assert "cannot be reached" in reply.json()["error"]["message"]
    assert "secret" not in reply.text
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "down")
    anthropic = client.post("/v1/messages", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (503, "overloaded_error")


def test_a_short_outage_of_the_only_engine_is_waited_out(served: Served):
    failures = iter([(503, b""), (503, b"")])
    engine = FakeEngine(fault=lambda body: next(failures, None))
    reply = served(engine).post("/v1/responses", json=BODY)
    assert (reply.status_code, len(engine.requests)) == (200, 3)


def test_without_patience_an_outage_of_the_only_engine_is_told_at_once(served: Served):
    engine = FakeEngine(fault=lambda body: (503, b""))
    reply = served(engine, outage_wait_seconds=0).post("/v1/responses", json=BODY)
    assert (reply.status_code, len(engine.requests)) == (503, 1)


def test_attempts_are_bounded_however_short_the_outages(served: Served):
    engine = FakeEngine(fault=lambda body: (503, b""))
    reply = served(engine, max_attempts=2, outage_wait_seconds=10).post("/v1/responses", json=BODY)
    assert (reply.status_code, len(engine.requests)) == (503, 2)
    assert "2 attempts" in reply.json()["error"]["message"]


def test_a_health_check_takes_an_engine_out_before_a_call_meets_it(served: Served):
    ill = FakeEngine()
    client = served(ill, FakeEngine(), health_check_seconds=0.05)
    client.get("/")
    ill.healthy = False
    until(lambda: states(client) == ["out", "in"], "a look at the ill engine")
    assert client.post("/v1/responses", json=BODY).status_code == 200
    assert ill.requests == []
    ill.healthy = True
    until(lambda: states(client) == ["in", "in"], "a look at the engine that is well again")


def test_calls_that_wait_for_an_engine_that_hangs_go_to_another_one(served: Served):
    """The engine accepts connections but stops answering during a call."""
    hung, other = FakeEngine(hangs=True), FakeEngine()
    client = served(hung, other, health_check_seconds=0.05, connect_timeout_seconds=0.3)
    begun = time.monotonic()
    assert client.post("/v1/responses", json=BODY).status_code == 200
    assert time.monotonic() - begun < 10  # three looks of five seconds without the key
    assert len(other.requests) == 1


async def test_calls_of_many_sessions_at_once_spread_by_load_and_none_is_lost_when_an_engine_fails(served: Served):
    """Engine 0 fails after its tenth call; 100 sessions of three calls continue without an error."""
    count = 0

    def breaks(body: dict[str, Any]) -> tuple[int, bytes] | None:
        nonlocal count
        count += 1
        return (503, b"dead") if count > 10 else None

    fakes = [FakeEngine(fault=breaks, healthy=True), FakeEngine(), FakeEngine()]
    client = served(*fakes)

    async def session(http: httpx.AsyncClient) -> None:
        cookies: dict[str, str] = {}
        for _ in range(3):
            reply = await http.post("/v1/responses", json=BODY, cookies=cookies)
            assert reply.status_code == 200, reply.text
            cookies = dict(reply.cookies)

    async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as http:
        gate = asyncio.Semaphore(32)

        async def one() -> None:
            async with gate:
                await session(httpx_without_cookies(http))

        await asyncio.gather(*(one() for _ in range(100)))
    answered = [len(fake.requests) for fake in fakes[1:]]
    assert sum(answered) >= 290
    assert min(answered) > 0.5 * max(answered)


def httpx_without_cookies(http: httpx.AsyncClient) -> Any:
    """The shared connections with cookies passed by hand, as NeMo Gym's clients do."""

    class Caller:
        async def post(self, path: str, *, json: Any, cookies: dict[str, str]) -> httpx.Response:
            http.cookies.clear()
            headers = {"cookie": "; ".join(f"{key}={value}" for key, value in cookies.items())} if cookies else {}
            return await http.post(path, json=json, headers=headers)

    return Caller()
