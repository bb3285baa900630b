"""Sessions of an environment server: bounded in number and idle time, each closed exactly once.

Invariant: at most `capacity` sessions exist. A session that was not used for `idle_seconds` ends. A session with an
unfinished rollout is never evicted; finished ones are (clients may ask for the verdict again, but need not). Every
session that leaves the store is passed to `on_end` exactly once, and its running work is cancelled.

    put ──> open ──finished──> finished ──┐
              └──── close, idle ──────────┴──> running work cancelled, on_end(session)

Closing in the background: each ended session's `close` runs once, after its running work has ended or run out of time,
and within a time limit. An error in it is logged and reaches no request. When the server stops, all remaining sessions
are closed first.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from roundhouse.errors import InfraError

T = TypeVar("T")

CAPACITY = 20_000
IDLE_SECONDS = 3600.0
"""An hour: longer than any rollout that its collector still waits for."""


class TooManySessions(InfraError):
    """All sessions are in use."""


class UnknownSession(InfraError):
    """No such session here: never seeded, expired, closed, or the server was restarted. A new rollout seeds a new one."""


class SessionEnded(InfraError):
    """The session was closed while something ran in it."""


@dataclass(slots=True)
class Seeded:
    """A rollout's state, and its running work."""

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
    """Return the result of a task of `Seeded.begin`. Cancelling the wait cancels the work, unless it is shielded.

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

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._open or session_id in self._finished

    def reserve(self) -> None:
        """Reserve room for one more session.

        Raises:
            TooManySessions: all places are taken.
        """
        self.expire()
        while len(self) >= self._capacity and self._finished:
            self._end(self._finished.popitem(last=False)[1])
        if len(self) >= self._capacity:
            raise TooManySessions(
                f"All {self._capacity} sessions are in use. Run fewer rollouts at once, or start more servers."
            )

    def put(self, session_id: str, state: Any) -> None:
        """Start a session; one with the same ID ends."""
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
        """End a session; return False if it does not exist."""
        for sessions in (self._open, self._finished):
            if session_id in sessions:
                self._end(sessions.pop(session_id))
                return True
        return False

    def expire(self) -> None:
        """End sessions that were idle for too long."""
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


class StickySession:
    """Gives every request a session id. Inside Starlette's SessionMiddleware, which sends the cookie only when the session
    was written to: hence the write on each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session = scope["session"]
            session["session_id"] = session.get("session_id") or str(uuid.uuid4())
        await self._app(scope, receive, send)


log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
LONGEST_SWEEP_SECONDS = 60.0
"""Idle sessions end at the next request, or at the next sweep without requests."""


class Closing:
    """Closes the sessions that leave `sessions` by awaiting `close(state)`."""

    def __init__(self, sessions: SessionStore, close: Callable[[Any], Awaitable[None]] | None) -> None:
        """Create the store. `close` None: sessions hold nothing to release."""
        self._sessions = sessions
        self._close = close
        self._running: set[asyncio.Task[None]] = set()
        sessions.on_end = self._begin if close is not None else None

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Run sweeps during the server's life, and close everything at its end."""
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            self._sessions.clear()
            if self._running:
                await asyncio.wait(self._running)

    def _begin(self, session: Seeded) -> None:
        task = asyncio.get_running_loop().create_task(self._end(session))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _end(self, session: Seeded) -> None:
        assert self._close is not None
        if session.running:
            await asyncio.wait(session.running, timeout=CLOSE_SECONDS)
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._close(session.state)
        except Exception:  # the environment's code ends here, and nobody waits for it
            log.exception("A session could not be closed")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(LONGEST_SWEEP_SECONDS, self._sessions.idle_seconds / 2))
            self._sessions.expire()
