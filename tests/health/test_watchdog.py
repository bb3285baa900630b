"""A stage without progress ends with an error that names the stuck work, wherever it hangs."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
import traceback

import pytest

from roundhouse.activity import Activity, Interrupted, Stalled, Supervision, run_interruptible, supervised
from roundhouse.errors import InfraError

LIMIT = 0.3


def test_work_gives_its_result_its_error_and_its_context_to_the_caller() -> None:
    variable = contextvars.ContextVar("v", default=0)
    variable.set(7)
    assert supervised(variable.get, "train", "iteration 1", LIMIT, Activity()) == 7
    with pytest.raises(KeyError, match="defect"):
        supervised(_defect, "train", "iteration 1", LIMIT, Activity())


def test_stages_share_a_thread_which_outlives_them_so_that_their_children_do_too() -> None:
    threads = {supervised(threading.get_ident, "train", f"iteration {k}", LIMIT, Activity()) for k in range(3)}
    assert len(threads) == 1
    assert threads < {thread.ident for thread in threading.enumerate()}
    with pytest.raises(Stalled):
        supervised(lambda: time.sleep(1), "train", "iteration 3", LIMIT / 3, Activity(), grace=0.1)
    after = supervised(threading.get_ident, "train", "iteration 3", LIMIT, Activity())
    assert after not in threads, "a thread whose work was given up takes no other"


def test_work_that_moves_may_take_longer_than_the_limit() -> None:
    activity = Activity()

    def work() -> str:
        for update in range(8):
            with activity.track("train", f"update {update}"):
                time.sleep(LIMIT / 4)
        return "done"

    assert supervised(work, "train", "iteration 1", LIMIT, activity) == "done"


def test_a_hanging_coroutine_is_named_and_closes_what_it_has_open() -> None:
    activity, closed = Activity(), threading.Event()

    async def hangs() -> None:
        try:
            with activity.track("engine", "model call", "g1/0", "http://engine:8000"):
                await asyncio.Event().wait()
        finally:
            closed.set()

    with pytest.raises(Stalled) as raised:
        supervised(lambda: run_interruptible(hangs()), "collect", "iteration 3", LIMIT, activity)
    assert isinstance(raised.value, InfraError)
    for word in ("collect (iteration 3)", "0.3 s", "engine: model call g1/0 at http://engine:8000"):
        assert word in str(raised.value)
    assert closed.is_set()
    assert activity.is_quiescent()


def test_a_loop_blocked_by_an_environment_is_given_up_and_the_line_is_named() -> None:
    async def blocks() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # an environment that never gives the event loop back
            time.sleep(0.01)  # noqa: ASYNC251 - that is what it does wrong

    begun = time.monotonic()
    with pytest.raises(Stalled) as raised:
        supervised(lambda: run_interruptible(blocks()), "collect", "iteration 3", LIMIT, Activity(), grace=1.0)
    assert time.monotonic() - begun < 10
    assert "in blocks" in str(raised.value)
    assert "time.sleep" in raised.value.stack
    assert _left(", in blocks\n")


def test_work_that_starts_threads_is_interrupted_and_not_the_threads_that_it_starts() -> None:
    def starts() -> None:
        while True:
            threading.Thread(target=lambda: None).start()

    for _ in range(12):
        with pytest.raises(Stalled):
            supervised(starts, "collect", "iteration 3", LIMIT / 6, Activity(), grace=4.0)
    assert _left(", in starts\n"), "it waits for ever for a thread that has ended before it began"


def test_work_that_was_given_up_before_it_began_does_not_begin() -> None:
    begun, busy = threading.Event(), threading.Event()
    late = Supervision(begun.set)
    late.thread.works.put(Supervision(lambda: busy.wait(30)))  # its thread has other things to do
    late.start()
    threading.Timer(0.5, busy.set).start()
    late.interrupt(20)
    assert late.done.is_set()
    assert not begun.is_set()
    with pytest.raises(Interrupted):
        late.outcome()


def test_a_call_that_cannot_be_interrupted_is_left_behind() -> None:
    end, ended = threading.Event(), threading.Event()

    def call() -> None:
        end.wait(60)  # one call into C, which no exception from another thread ends
        ended.set()

    with pytest.raises(Stalled):
        supervised(call, "train", "iteration 1", LIMIT, Activity(), grace=0.2)
    assert not ended.is_set()
    end.set()


def test_a_hanging_process_of_a_stage_is_ended_with_it() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def work() -> None:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        started.append(process)
        try:
            process.wait(600)
        finally:
            process.kill()
            process.wait()

    with pytest.raises(Stalled, match="train"):
        supervised(work, "train", "iteration 1", LIMIT, Activity())
    assert started[0].poll() is not None


def test_an_interrupted_caller_interrupts_the_work() -> None:
    ended = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def caller() -> None:
        with pytest.raises(KeyboardInterrupt):
            supervised(lambda: run_interruptible(waits()), "collect", "iteration 1", 60, _Interrupting())

    caller()
    assert ended.is_set()


def _defect() -> None:
    raise KeyError("defect")


class _Interrupting(Activity):
    """Ctrl-C while the caller waits."""

    def is_stalled(self, token: str, limit: float) -> bool:
        raise KeyboardInterrupt


def _left(line: str, seconds: float = 5) -> bool:
    """Return whether no thread is at this line."""
    deadline = time.monotonic() + seconds
    while any(line in "".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
