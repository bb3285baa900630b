"""What is in flight is known: since when, for what, and whether it moves."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.activity import Activity


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(["start", "end", "end twice"]), st.integers(0, 5))))
def test_what_was_started_and_has_not_ended_is_in_flight(steps: list[tuple[str, int]]) -> None:
    activity = Activity()
    running: list[str] = []
    for what, number in steps:
        if what == "start":
            running.append(activity.start("m", f"k{number}"))
        elif running:
            token = running.pop(number % len(running))
            activity.end(token)
            if what == "end twice":
                activity.end(token)
        assert sorted(work.token for work in activity.in_flight()) == sorted(running)
        assert activity.is_quiescent() is (not running)


def test_progress_of_a_part_is_progress_of_the_whole_and_not_of_its_sibling() -> None:
    clock = Clock()
    activity = Activity(clock)
    with activity.track("collect", "stage") as stage:
        stuck = activity.start("collect", "rollout", "g0/0")
        with activity.track("collect", "rollout", "g0/1"):
            clock.now = 10.0
            call = activity.start("engine", "model call", "g0/1", "http://engine")
            clock.now = 12.0
            activity.advance(call)
            clock.now = 13.0
            silent = {work.token: work.silent_seconds for work in activity.in_flight()}
    assert silent[stage] == silent[call] == 1.0
    assert silent[stuck] == 13.0
    oldest = activity.in_flight()[0]
    assert str(oldest) == "collect: rollout g0/0, 13.0 s, silent for 13.0 s"


def test_work_with_a_time_limit_of_its_own_may_be_silent_until_then() -> None:
    clock = Clock()
    activity = Activity(clock)
    with activity.track("refit", "stage") as stage, activity.track("refit", "engine", patience=60):
        clock.now = 50.0
        assert not activity.is_stalled(stage, 10)
        clock.now = 61.0
        assert activity.is_stalled(stage, 10)
        assert not activity.is_stalled(stage, 70)


def test_coroutines_and_threads_belong_to_the_work_that_began_them() -> None:
    activity = Activity()

    async def rollout(name: str) -> int:
        with activity.track("collect", "rollout", name):
            return await asyncio.to_thread(lambda: len(activity.in_flight(stage)))

    async def both() -> list[int]:
        return list(await asyncio.gather(rollout("a"), rollout("b")))

    with activity.track("collect", "stage") as stage:
        assert max(asyncio.run(both())) >= 2
        activity.start("other", "work of the stage")
    outside = activity.start("other", "work")
    assert outside not in {work.token for work in activity.in_flight(stage)}


def test_quiescence_is_waited_for_within_a_time_limit() -> None:
    activity = Activity()
    token = activity.start("collect", "rollout")
    other = activity.start("refit", "engine")
    assert not activity.wait_quiescent(0.05)
    threading.Timer(0.1, activity.end, [token]).start()
    assert activity.wait_quiescent(10, "collect")
    assert not activity.is_quiescent()
    activity.end(other)
    assert activity.is_quiescent()


def test_the_gauges_and_the_summary_count_by_kind_and_show_the_oldest() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.start("engine", "model call", "g0/0", "http://e")
    clock.now = 5.0
    activity.start("engine", "model call", "g0/1", "http://e")
    assert activity.gauges() == {"activity/engine_in_flight": 2.0, "activity/engine_oldest_seconds": 5.0}
    assert activity.summary() == (
        "2 in flight, the oldest: engine: model call g0/0 at http://e, 5.0 s, silent for 5.0 s"
    )


def test_a_block_that_raises_leaves_nothing_in_flight() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity.track("collect", "rollout"):
        raise KeyError
    assert activity.summary() == "nothing in flight"
