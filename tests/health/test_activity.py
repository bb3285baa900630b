"""Work in flight is known: its start, its purpose, and its progress."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundhouse.activity import ACTIVITY, Activity
from roundhouse.config.loading import parse_config
from roundhouse.health.errors import Severity
from roundhouse.store.run import open_run
from roundhouse_tasks.health import heartbeat, reporter_of


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


def test_a_failure_in_tracked_work_is_reported_once_by_its_innermost_block_and_raised_on() -> None:
    activity = Activity()
    told: list[tuple[str, str, str]] = []
    with activity.failures_to(lambda module, what, error: told.append((module, what, str(error)))):
        with (
            pytest.raises(ValueError, match="refused"),
            activity.track("collect", "rollout", "g0/1"),
            activity.track("engine", "model call"),
        ):
            raise ValueError("refused")
        with pytest.raises(KeyboardInterrupt), activity.track("collect", "rollout", "g0/2"):
            raise KeyboardInterrupt
        with activity.track("collect", "rollout", "g0/3"):
            pass
    assert told == [("engine", "model call", "refused")]
    with pytest.raises(ValueError, match="later"), activity.track("engine", "model call"):
        raise ValueError("later")
    assert len(told) == 1
    assert activity.is_quiescent()


def test_a_run_records_failures_of_its_tracked_work_one_a_minute_of_a_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server for the events of a process that knows none; it would be started for this test and end with the last.
    monkeypatch.setattr("prefect.events.worker.should_emit_events_to_ephemeral_server", lambda: False)
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    with heartbeat(run):
        for error in (TimeoutError("first"), TimeoutError("second"), ConnectionError("other")):
            with suppress(OSError), ACTIVITY.track("engine", "model call", "g0/1"):
                raise error
    reported = [
        (each.module_name, each.work_context, each.message, each.severity) for each in reporter_of(run).errors()
    ]
    assert reported == [
        ("engine", "model call g0/1", "first", Severity.INFO),
        ("engine", "model call g0/1", "other", Severity.INFO),
    ]
    assert reporter_of(run).health().status == "healthy"
