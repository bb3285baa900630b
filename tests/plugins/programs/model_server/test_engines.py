"""Choice of an engine for a call, without a network."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.plugins.programs.model_server import engine_client
from roundhouse.plugins.programs.model_server.engine_client import (
    DOUBTS,
    LONGEST_OUT_SECONDS,
    EngineChoice,
    EngineClient,
)
from roundhouse.plugins.programs.model_server.section import ModelServerConfig


def choice(count: int = 3, max_sessions: int = 1000) -> EngineChoice:
    return EngineChoice([f"http://e{number}" for number in range(count)], max_sessions)


def test_a_session_stays_with_its_engine_and_new_ones_spread():
    engines = choice()
    first = {name: engines.choose(name, 0.0) for name in "abcdef"}
    assert {name: engines.choose(name, 1.0) for name in "abcdef"} == first
    assert [engine.sessions for engine in engines.engines] == [2, 2, 2]


def test_new_sessions_go_where_the_fewest_calls_are_in_flight():
    engines = choice()
    engines.engines[0].in_flight, engines.engines[2].in_flight = 2, 1
    assert engines.choose("a", 0.0) is engines.engines[1]


def test_a_failed_engine_is_out_for_a_growing_bounded_time_and_its_sessions_move_on_for_good():
    engines = choice(2)
    first = engines.choose("a", 0.0)
    assert first is not None
    now, times = 0.0, []
    for _ in range(9):
        engines.failed(first, now, "gone")
        times.append(first.out_until - now)
        now = first.out_until
    assert times[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(times) == LONGEST_OUT_SECONDS
    engines.failed(first, now, "gone")
    other = engines.choose("a", now)
    assert other is not first
    engines.answered(first)
    assert engines.choose("a", now) is other


def test_failures_that_come_together_count_once():
    engines = choice(1)
    for _ in range(50):
        engines.failed(engines.engines[0], 10.0, "gone")
    assert engines.engines[0].out_until == 10.5


def test_one_poisonous_request_does_not_take_an_engine_away():
    engines = choice(1)
    (engine,) = engines.engines
    for _ in range(DOUBTS - 1):
        engines.doubted(engine, 0.0, "500")
    assert engine.is_in(0.0)
    engines.answered(engine)
    engines.doubted(engine, 0.0, "500")
    assert engine.is_in(0.0)


def test_with_all_engines_out_there_is_none_until_the_first_returns():
    engines = choice(2)
    for engine in engines.engines:
        engines.failed(engine, 0.0, "gone")
    assert engines.choose("a", 0.1) is None
    assert engines.choose("a", engines.next_return()) is not None


def test_a_passed_health_check_brings_an_engine_back_but_the_next_failure_counts_on():
    engines = choice(1)
    (engine,) = engines.engines
    engines.failed(engine, 0.0, "gone")
    engines.passed_check(engine)
    assert engines.choose("a", 0.1) is engine
    engines.failed(engine, 0.1, "gone")
    assert engine.out_until == 1.1


def test_a_session_that_is_one_too_many_is_forgotten():
    engines = EngineClient(ModelServerConfig(base_url=["http://a", "http://b"], max_sessions=1)).choice
    first = engines.choose("a", 0.0)
    engines.choose("b", 0.0)
    assert first is not None
    first.in_flight = 1
    assert engines.choose("a", 0.0) is not first


async def test_the_pause_between_health_checks(monkeypatch: pytest.MonkeyPatch):
    async def sleep(seconds: float) -> None:
        raise InterruptedError(f"{seconds:g} s")

    client = EngineClient(ModelServerConfig(base_url=["http://e"], health_check_seconds=77))
    monkeypatch.setattr(engine_client.asyncio, "sleep", sleep)
    client.open()
    [check] = asyncio.all_tasks() - {asyncio.current_task()}
    with pytest.raises(InterruptedError, match="77 s"):
        await check
    await client.close()


events = st.lists(st.tuples(st.sampled_from(["ask", "fail", "answer", "wait"]), st.integers(0, 2)), max_size=60)


@given(events)
def test_whatever_happens_a_chosen_engine_is_in_and_none_is_out_for_longer_than_the_limit(
    events: list[tuple[str, int]],
):
    engines, now = choice(), 0.0
    for what, number in events:
        engine = engines.engines[number]
        if what == "ask":
            chosen = engines.choose(str(number), now)
            assert chosen.is_in(now) if chosen else not any(item.is_in(now) for item in engines.engines)
        elif what == "fail":
            engines.failed(engine, now, "gone")
        elif what == "answer":
            engines.answered(engine)
        else:
            now += 0.4
        assert all(item.out_until <= now + LONGEST_OUT_SECONDS for item in engines.engines)
