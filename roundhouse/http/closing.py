"""Giving sessions back in the background of a server.

Invariant: each ended session's `close` runs once, after what still ran in the session has ended or has had its time to, and
within a time limit; an error in it is logged and reaches no request; when the server stops, every session that still exists is
given back before it does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from roundhouse.http.sessions import Seeded, SessionStore

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
LONGEST_SWEEP_SECONDS = 60.0
"""Idle sessions end at the next request, or at the next sweep when there is none."""


class Closing:
    """Closes the sessions that leave `sessions` by awaiting `close(state)`."""

    def __init__(self, sessions: SessionStore, close: Callable[[Any], Awaitable[None]] | None) -> None:
        """`close` None: sessions hold nothing that has to be given back."""
        self._sessions = sessions
        self._close = close
        self._running: set[asyncio.Task[None]] = set()
        sessions.on_end = self._begin if close is not None else None

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """The server's life: sweeps while it runs, everything given back at its end."""
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
