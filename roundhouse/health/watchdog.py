"""Runs a stage so that it cannot hang: when nothing in it moves, the stage is given up with an error that says what is stuck.

Invariant: `supervised` returns, or raises, at the latest `limit + GRACE_SECONDS` after the last progress of its work. The work
runs in a thread of its own, since nothing in a thread can end a call of that thread that does not return.

    caller ── waits ──────────────── nothing moved for `limit` ──> interrupts the work ──> Stalled (an InfraError)
    work   ── track(…) … track(…) … ──────────── hangs ───────────────────X

Work that is interrupted cleans up as after Ctrl-C. Work that hangs in a call of the operating system or of a C library cannot
be interrupted; it is left behind in its daemon thread. What it may still write is an attempt of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Generic, TypeVar

from roundhouse.activity import ACTIVITY, Activity, Work
from roundhouse.errors import InfraError

T = TypeVar("T")

GRACE_SECONDS = 10.0
"""For interrupted work to close what it has open."""
_INTERRUPT_SECONDS = 0.2
_NAMED = 5
"""Pieces of work that the message names; it counts the others."""
_STACK_FRAMES = 12


class Stalled(InfraError):
    """Nothing moved for `failures.stall_seconds`."""

    def __init__(self, message: str, stack: str = "") -> None:
        super().__init__(message)
        self.stack = stack
        """Where the stage's thread stood."""


class Interrupted(BaseException):
    """Raised inside work that was given up. No `except Exception` takes it for a failure of its own."""


def supervised(
    work: Callable[[], T],
    stage: str,
    about: str,
    limit: float,
    activity: Activity = ACTIVITY,
    grace: float = GRACE_SECONDS,
    refuse: Callable[[], None] = lambda: None,
) -> T:
    """The result of `work`, as stage `stage` (about `iteration 3`, say), or its error.

    Args:
        refuse: called about once a second; what it raises ends the work.

    Raises:
        Stalled: nothing in it moved for `limit` seconds.
    """
    with activity.track(stage, "stage", about) as token:
        supervision = _Supervision(work)
        supervision.start()
        try:
            while not supervision.done.wait(max(0.01, min(1.0, limit / 5))):
                refuse()
                if activity.is_stalled(token, limit):
                    raise _stalled(stage, about, limit, activity.in_flight(token)[1:], supervision)
        except BaseException:
            supervision.interrupt(grace)
            raise
        return supervision.outcome()


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, which a stage's watchdog can cancel from outside."""
    supervision = _supervision.get()
    return asyncio.run(main if supervision is None else supervision.cancellable(main))


class _Supervision(Generic[T]):
    """Work in a thread, and the means to end it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.done = threading.Event()
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._context = contextvars.copy_context()
        self.given_up = False
        self.thread = _free_worker()

    def start(self) -> None:
        self.thread.works.put(self)

    def run(self) -> None:
        """Do the work, in the context of who asked for it."""
        self._context.run(self._run)

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # `_run` has set it, where T may be None

    async def cancellable(self, main: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._main = asyncio.get_running_loop(), task
        try:
            return await main
        finally:
            self._main = None

    def stack(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-_STACK_FRAMES:])

    def interrupt(self, grace: float) -> None:
        """End the work if it can be ended, within `grace` seconds: its event loop first, then the thread itself."""
        self.given_up = True
        if (main := self._main) is not None:
            loop, task = main
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)
            if self.done.wait(grace / 2):
                return
        deadline = time.monotonic() + grace / 2
        while self.thread.ident is not None and time.monotonic() < deadline:
            # Again and again: in an event loop it ends one coroutine, and the next one may block in the same way.
            # Raised in that thread when it next runs Python code
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), ctypes.py_object(Interrupted))
            if self.done.wait(_INTERRUPT_SECONDS):
                return

    def _run(self) -> None:
        _supervision.set(self)
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again, in the caller
            self._error = error
        finally:
            self.done.set()


class _Worker(threading.Thread):
    """A thread that does one supervised work after another, and lives as long as the process.

    Linux ends a child that asked to die with its parent (Ray's do) when the *thread* that started it ends. One whose work was
    given up takes no other work, since an interruption may still be on its way to it.
    """

    def __init__(self) -> None:
        super().__init__(name="stage worker", daemon=True)
        self.works: queue.SimpleQueue[_Supervision[Any]] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                supervision = self.works.get()
                supervision.run()
                if not supervision.given_up:
                    _free.append(self)
            except Interrupted:
                continue


_free: list[_Worker] = []


def _free_worker() -> _Worker:
    try:
        return _free.pop()
    except IndexError:
        worker = _Worker()
        worker.start()
        return worker


_supervision: contextvars.ContextVar[_Supervision[Any] | None] = contextvars.ContextVar("supervision", default=None)


def _stalled(stage: str, about: str, limit: float, parts: list[Work], supervision: _Supervision[Any]) -> Stalled:
    stack = supervision.stack()
    leaves = sorted(parts, key=lambda work: (-round(work.silent_seconds, 1), work.seconds))  # a part before its whole
    named = "".join(f"\n  {work}" for work in leaves[:_NAMED])
    more = f"\n  and {len(leaves) - _NAMED} more" if len(leaves) > _NAMED else ""
    stands = stack.strip().splitlines()
    place = f"\n  it stands at {' '.join(line.strip() for line in stands[-2:])}" if stands else ""
    what = f" Stuck are:{named}{more}" if leaves else ""
    return Stalled(
        f"{stage} ({about}): nothing has moved for {limit:g} s (failures.stall_seconds); the attempt is given up.{what}{place}",
        stack,
    )
