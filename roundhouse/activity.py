"""Work in flight in this process, with its last progress, and the watchdog that aborts a hanging stage.

Invariant: started, unfinished work is in flight, and ended work leaves nothing. Starting, advancing or ending work is
progress of that work and of everything that it belongs to, so a stage that still finishes model calls makes progress.

    collect 3 ──┬── rollout g1/0 ── model call http://…    oldest; moved 4 s ago
                └── rollout g1/1 ── environment calculator

Work started inside the block of other work (also in its coroutines, and in threads that take over its context) is part
of it.

Stages report progress by `announce`, as log records of the logger `roundhouse.progress`; handlers read the record's
`event` and `facts`.

`supervised` returns or raises at the latest `limit + GRACE_SECONDS` after the last progress of its work. The work runs
in a separate thread, because a thread cannot end its own call that does not return.

    caller ── waits ──────────────── nothing moved for `limit` ──> interrupts the work ──> Stalled (an InfraError)
    work   ── track(…) … track(…) … ──────────── hangs ───────────────────X

Interrupted work cleans up as after Ctrl-C. Work that hangs in a call of the operating system or a C library cannot be
interrupted; its daemon thread is abandoned, and any later writes belong to a separate attempt.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import itertools
import logging
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

from roundhouse.errors import InfraError


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work in flight, as it was when it was asked for."""

    token: str
    module: str
    """Module that does it: collect, engine, environment, train, …"""
    kind: str
    """Kind of work: rollout, model call, update 3 of 8, …"""
    about: str
    """Subject, such as a rollout's ID."""
    where: str
    """URL or server that is awaited, if any."""
    seconds: float
    """Since it began."""
    silent_seconds: float
    """Since it, or a part of it, last moved."""

    def __str__(self) -> str:
        about = f" {self.about}" if self.about else ""
        where = f" at {self.where}" if self.where else ""
        return f"{self.module}: {self.kind}{about}{where}, {self.seconds:.1f} s, silent for {self.silent_seconds:.1f} s"


@dataclass(slots=True)
class _Begun:
    module: str
    kind: str
    about: str
    where: str
    parent: str | None
    patience: float
    began: float
    moved: float


FailureListener = Callable[[str, str, Exception], None]
"""(module, activity, exception); called in the raising thread."""
_REPORTED = "__roundhouse_reported__"
_within: ContextVar[str | None] = ContextVar("roundhouse_work", default=None)


class Activity:
    """The work of one process; safe to use from any thread. `clock` gives seconds that never run backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[str, _Begun] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._listeners: list[FailureListener] = []

    @contextmanager
    def failures_to(self, listener: FailureListener) -> Iterator[None]:
        """Have the failures of tracked blocks passed on for the time of the block."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def start(self, module: str, kind: str, about: str = "", where: str = "", patience: float = 0.0) -> str:
        """Start work as a part of the context's work and return its token.

        Args:
            patience: seconds of allowed silence, because it has a separate time limit.
        """
        now, parent = self._clock(), _within.get()
        token = f"{module}-{next(self._numbers)}"
        with self._changed:
            self._begun[token] = _Begun(module, kind, about, where, parent, patience, now, now)
            self._move(parent, now)
        return token

    def advance(self, token: str | None = None) -> None:
        """Record progress of this work (by default the context's own)."""
        with self._changed:
            self._move(_within.get() if token is None else token, self._clock())

    def end(self, token: str) -> None:
        """End work; ending it twice does nothing."""
        with self._changed:
            work = self._begun.pop(token, None)
            if work is not None:
                self._move(work.parent, self._clock())
                self._changed.notify_all()

    @contextmanager
    def track(self, module: str, kind: str, about: str = "", where: str = "", patience: float = 0.0) -> Iterator[str]:
        """The work of a block; arguments as of `start`. An exception that leaves it is passed to the listeners, once for all
        blocks that it leaves, as the failure of the innermost."""
        token = self.start(module, kind, about, where, patience)
        outer = _within.set(token)
        try:
            yield token
        except Exception as error:
            if not getattr(error, _REPORTED, False):
                with suppress(AttributeError):  # an exception without a place for attributes is reported by each block
                    setattr(error, _REPORTED, True)
                for listener in self._listeners:
                    listener(module, " ".join(word for word in (kind, about) if word), error)
            raise
        finally:
            _within.reset(outer)
            self.end(token)

    def in_flight(self, within: str | None = None) -> list[Work]:
        """Return work in flight, oldest first; with `within`, only the parts of that work."""
        with self._changed:
            now = self._clock()
            chosen = [
                (token, work) for token, work in self._begun.items() if within is None or self._is_in(token, within)
            ]
        return [
            Work(token, b.module, b.kind, b.about, b.where, now - b.began, now - b.moved)
            for token, b in sorted(chosen, key=lambda item: item[1].began)
        ]

    def silent_seconds(self, token: str) -> float:
        """Return the seconds since this work or a part of it last moved; 0 after its end."""
        with self._changed:
            work = self._begun.get(token)
            return 0.0 if work is None else self._clock() - work.moved

    def is_stalled(self, token: str, limit: float) -> bool:
        """Return whether this work has not moved for `limit` seconds, and no part of it is within its patience."""
        with self._changed:
            work, now = self._begun.get(token), self._clock()
            if work is None or now - work.moved <= limit:
                return False
            parts = [part for name, part in self._begun.items() if part.patience and self._is_in(name, token)]
            return all(now - part.moved > part.patience for part in parts)

    def around(self) -> list[Work]:
        """The work that this context is in, outermost first."""
        chain, token = [], _within.get()
        with self._changed:
            now = self._clock()
            while token is not None and (b := self._begun.get(token)) is not None:
                chain.append(Work(token, b.module, b.kind, b.about, b.where, now - b.began, now - b.moved))
                token = b.parent
        return chain[::-1]

    def is_quiescent(self, module: str | None = None) -> bool:
        """Return whether nothing is in flight (in one module)."""
        with self._changed:
            return self._is_quiescent(module)

    def wait_quiescent(self, timeout: float, module: str | None = None) -> bool:
        """Wait until nothing is in flight (in one module), at most `timeout` seconds; whether that came about."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_quiescent(module), timeout)

    def summary(self, within: str | None = None) -> str:
        """One line a kind of work: how many, and the oldest of them."""
        works = self.in_flight(within)
        counts = Counter((work.module, work.kind) for work in works)
        oldest = {(work.module, work.kind): work for work in reversed(works)}
        lines = [f"{count} in flight, the oldest: {oldest[key]}" for key, count in counts.items()]
        return "\n".join(lines) if lines else "nothing in flight"

    def gauges(self) -> dict[str, float]:
        """Numbers for a plot: how much is in flight by module, and the age of the oldest."""
        values: dict[str, float] = {}
        for work in self.in_flight():
            count, age = f"activity/{work.module}_in_flight", f"activity/{work.module}_oldest_seconds"
            values[count] = values.get(count, 0.0) + 1
            values[age] = max(values.get(age, 0.0), work.seconds)
        return values

    def _is_quiescent(self, module: str | None) -> bool:
        return not any(module is None or work.module == module for work in self._begun.values())

    def _is_in(self, token: str, within: str) -> bool:
        current: str | None = token
        while current is not None and current != within:
            work = self._begun.get(current)
            current = None if work is None else work.parent
        return current is not None

    def _move(self, token: str | None, now: float) -> None:
        while token is not None and (work := self._begun.get(token)) is not None:
            work.moved = now
            token = work.parent


ACTIVITY = Activity()
"""The activity of this process, as it has one root logger."""


logger = logging.getLogger("roundhouse.progress")
logger.setLevel(logging.INFO)


def announce(event: str, **facts: Any) -> None:
    """Publish an event: `warm_start`, `engine`, `collect`, `iteration`, `evaluation`, … with its facts. It is also a sign of
    life of the stage that it comes from."""
    ACTIVITY.advance()
    logger.info(event, extra={"event": event, "facts": facts})


T = TypeVar("T")


GRACE_SECONDS = 10.0
"""Time for interrupted work to close its resources."""


_INTERRUPT_SECONDS = 0.2


_NAMED = 5
"""Pieces of work that the message names; it counts the others."""


_STACK_FRAMES = 12


class Stalled(InfraError):
    """Nothing moved for `failures.stall_seconds`."""

    def __init__(self, message: str, stack: str = "") -> None:
        super().__init__(message)
        self.stack = stack
        """Stack of the stage's thread."""


class Interrupted(BaseException):
    """Raised inside aborted work. `except Exception` does not catch it."""


def supervised(
    work: Callable[[], T],
    stage: str,
    about: str,
    limit: float,
    activity: Activity = ACTIVITY,
    grace: float = GRACE_SECONDS,
    refuse: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of `work`, as stage `stage` (about `iteration 3`, for example), or raise its error.

    Args:
        refuse: called about once a second; its exception ends the work.

    Raises:
        Stalled: nothing in it moved for `limit` seconds.
    """
    with activity.track(stage, "stage", about) as token:
        supervision = Supervision(work)
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
    if supervision is None:
        return asyncio.run(main)
    try:
        return asyncio.run(supervision.cancellable(main))
    finally:
        supervision.leave_loop()


class Supervision(Generic[T]):
    """Work in a thread that other work had before it, and the means to end it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.done = threading.Event()
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._main: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._gate = threading.Lock()
        """Held while its event loop or the work itself is declared ended, and while its thread is interrupted, so that what
        has ended is never interrupted."""
        self._context = contextvars.copy_context()
        self.given_up = False
        self._begun = False
        try:
            self.thread = _free.pop()
        except IndexError:
            self.thread = _Worker()
            self.thread.start()
        self._inner: Supervision[Any] | None = None
        """Work of this kind that this work has begun and waits for."""
        if (outer := _supervision.get()) is not None:
            outer._inner = self

    def start(self) -> None:
        self.thread.works.put(self)

    def run(self) -> None:
        """Do the work, in the caller's context."""
        self._context.run(self._run)

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # `_run` has set it, where T may be None

    async def cancellable(self, main: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._main = asyncio.get_running_loop(), task
        return await main

    def leave_loop(self) -> None:
        """Its event loop has ended."""
        self._declare(lambda: setattr(self, "_main", None))

    def stack(self) -> str:
        """Return its position, or that of the work it waits for."""
        if self._inner is not None and not self._inner.done.is_set():
            return self._inner.stack()
        frame: FrameType | None = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-_STACK_FRAMES:])

    def interrupt(self, grace: float) -> None:
        """End the work if possible, within `grace` seconds: its event loop first, then the thread itself, then the
        event loop of the work that it waits for. Work after that loop, such as storing results, is not interrupted."""
        self.given_up = True
        if (main := self._main) is not None:
            loop, task = main
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)
            if self.done.wait(grace / 2):
                return
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < grace / 2:
            # Again and again: in an event loop it ends one coroutine, and the next one may block in the same way.
            self._interrupt_thread()
            if (inner := self._inner) is not None and seconds > grace / 5:
                inner.given_up = True
                inner._interrupt_thread(only_in_loop=True)
            if self.done.wait(_INTERRUPT_SECONDS):
                return

    def _interrupt_thread(self, only_in_loop: bool = False) -> None:
        """Raise `Interrupted` in its thread when that next runs Python code, unless it has ended."""
        deadline = time.monotonic() + _INTERRUPT_SECONDS
        while time.monotonic() < deadline:
            with self._gate:
                ident, ended = self.thread.ident, self._main is None if only_in_loop else self.done.is_set()
                if ident is None or ended or not self._begun:  # work that has not started does not start: `_run`
                    return
                if not _starts_a_thread(ident):
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interrupted))
                    return
            time.sleep(0.005)

    def _run(self) -> None:
        _supervision.set(self)
        try:
            with self._gate:
                self._begun = not self.given_up
            if not self._begun:
                raise Interrupted
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again, in the caller
            self._error = error
        finally:
            self._declare(self.done.set)

    def _declare(self, end: Callable[[], None]) -> None:
        while True:
            try:
                with self._gate:
                    return end()
            except Interrupted:  # on its way since before
                continue


def _starts_a_thread(ident: int) -> bool:
    """Return whether a thread has started another that does not run yet. Python 3.11 registers it under the starting
    thread, so an interruption could end it before it reports that it runs, for which the other waits for ever."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].ident is None


class _Worker(threading.Thread):
    """A thread that does one supervised work after another, and lives as long as the process.

    Linux ends a child that asked to die with its parent (Ray's do) when the *thread* that started it ends. A worker
    takes no other work after an abort, because an interruption may still be on its way.
    """

    def __init__(self) -> None:
        super().__init__(name="stage worker", daemon=True)
        self.works: queue.SimpleQueue[Supervision[Any]] = queue.SimpleQueue()

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


_supervision: contextvars.ContextVar[Supervision[Any] | None] = contextvars.ContextVar("supervision", default=None)


def _stalled(stage: str, about: str, limit: float, parts: list[Work], supervision: Supervision[Any]) -> Stalled:
    stack = supervision.stack()
    leaves = sorted(parts, key=lambda work: (-round(work.silent_seconds, 1), work.seconds))  # a part before its whole
    named = "".join(f"\n  {work}" for work in leaves[:_NAMED])
    more = f"\n  and {len(leaves) - _NAMED} more" if len(leaves) > _NAMED else ""
    stands = stack.strip().splitlines()
    place = f"\n  it stands at {' '.join(line.strip() for line in stands[-2:])}" if stands else ""
    what = f" Stuck are:{named}{more}" if leaves else ""
    return Stalled(
        f"{stage} ({about}): nothing has moved for {limit:g} s (failures.stall_seconds); the attempt ends.{what}{place}",
        stack,
    )
