"""The sessions of an environment server: few enough to fit, none for ever, and each given back once.

Invariant: at most `capacity` sessions exist; one that was not used for `idle_seconds` is gone; a session whose rollout is not
finished is never thrown out to make room. Finished ones are (clients may ask for the verdict again, but need not). Every
session that leaves the store, for whatever reason, is handed to `on_end` exactly once, and what still runs in it is cancelled.

    put ──> open ──finished──> finished ──┐
              └──── close, idle ──────────┴──> running work cancelled, on_end(session)
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roundhouse.errors import InfraError

T = TypeVar("T")

CAPACITY = 20_000
IDLE_SECONDS = 3600.0
"""An hour: longer than any rollout that its collector has not given up."""


class TooManySessions(InfraError):
    """All sessions are in use."""


class UnknownSession(InfraError):
    """No such session here: never seeded, expired, closed, or the server was restarted. A new rollout seeds a new one."""


class SessionEnded(InfraError):
    """The session was closed while something ran in it."""


@dataclass(slots=True)
class Seeded:
    """A rollout's state, and what works on it at present."""

    state: Any
    used_at: float
    running: set[asyncio.Task[Any]] = field(default_factory=set)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """`work` as a task that is cancelled when the session ends."""
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task


async def outcome(work: asyncio.Future[T]) -> T:
    """What a task of `Seeded.begin` returned. Who cancels the waiting, cancels the work as well, unless it is shielded.

    Raises:
        SessionEnded: the session ended before it.
    """
    try:
        return await work
    except asyncio.CancelledError:
        if (waiting := asyncio.current_task()) is not None and waiting.cancelling():
            raise
        raise SessionEnded("The session was closed before this was done.") from None


class SessionStore:
    """Sessions by id, the longest unused first."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Seeded], None] | None = None,
    ) -> None:
        self.on_end = on_end
        """Called with each session that ends; must not raise."""
        self.idle_seconds = idle_seconds
        self._capacity = capacity
        self._clock = clock
        self._open: OrderedDict[str, Seeded] = OrderedDict()
        self._finished: OrderedDict[str, Seeded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._finished)

    def reserve(self) -> None:
        """Make room for one more.

        Raises:
            TooManySessions: there is none.
        """
        self.expire()
        while len(self) >= self._capacity and self._finished:
            self._end(self._finished.popitem(last=False)[1])
        if len(self) >= self._capacity:
            raise TooManySessions(
                f"All {self._capacity} sessions are in use. Run fewer rollouts at once, or start more servers."
            )

    def put(self, session_id: str, state: Any) -> None:
        """Begin a session; one that had the same id ends."""
        self.close(session_id)
        self.reserve()
        self._open[session_id] = Seeded(state, self._clock())

    def get(self, session_id: str) -> Seeded:
        """The session, used now.

        Raises:
            UnknownSession
        """
        self.expire()
        for sessions in (self._open, self._finished):
            if session_id in sessions:
                sessions.move_to_end(session_id)
                sessions[session_id].used_at = self._clock()
                return sessions[session_id]
        raise UnknownSession(
            "This session is not known here: seed it first. Sessions end with the server, when closed and when unused."
        )

    def finished(self, session_id: str) -> None:
        """The session's rollout is over: it may make room for others."""
        if session_id in self._open:
            self._finished[session_id] = self._open.pop(session_id)

    def close(self, session_id: str) -> bool:
        """End a session; False if there is none."""
        for sessions in (self._open, self._finished):
            if session_id in sessions:
                self._end(sessions.pop(session_id))
                return True
        return False

    def expire(self) -> None:
        """End what was not used for too long."""
        oldest = self._clock() - self.idle_seconds
        for sessions in (self._open, self._finished):
            while sessions and next(iter(sessions.values())).used_at < oldest:
                self._end(sessions.popitem(last=False)[1])

    def clear(self) -> None:
        """End all."""
        for sessions in (self._open, self._finished):
            while sessions:
                self._end(sessions.popitem(last=False)[1])

    def _end(self, seeded: Seeded) -> None:
        for task in seeded.running:
            task.cancel()
        if self.on_end is not None:
            self.on_end(seeded)
