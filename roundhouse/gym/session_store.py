"""The sessions of a resources server: few enough to fit, and none for ever.

Invariant: at most `capacity` sessions exist; one that was not used for `idle_seconds` is gone; a session whose rollout is not
verified yet is never thrown out to make room. Verified ones are (clients may ask for the verdict again, but need not).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundhouse.errors import InfraError

CAPACITY = 20_000
IDLE_SECONDS = 3600.0
"""An hour: longer than any rollout that its collector has not given up."""


class TooManySessions(InfraError):
    """All sessions are in use."""


class UnknownSession(InfraError):
    """No such session here: never seeded, expired, or the server was restarted. A new rollout seeds a new one."""


@dataclass(slots=True)
class Seeded:
    """A rollout's state."""

    state: Any
    used_at: float


class SessionStore:
    """Sessions by id, the longest unused first."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._open: OrderedDict[str, Seeded] = OrderedDict()
        self._verified: OrderedDict[str, Seeded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open) + len(self._verified)

    def reserve(self) -> None:
        """Make room for one more.

        Raises:
            TooManySessions: there is none.
        """
        self._expire()
        while len(self) >= self._capacity and self._verified:
            self._verified.popitem(last=False)
        if len(self) >= self._capacity:
            raise TooManySessions(
                f"All {self._capacity} sessions are in use. Run fewer rollouts at once, or start more servers."
            )

    def put(self, session_id: str, state: Any) -> None:
        """Begin a session; one that had the same id ends."""
        self.reserve()
        self._verified.pop(session_id, None)
        self._open.pop(session_id, None)
        self._open[session_id] = Seeded(state, self._clock())

    def get(self, session_id: str) -> Seeded:
        """The session, used now.

        Raises:
            UnknownSession
        """
        self._expire()
        for sessions in (self._open, self._verified):
            if session_id in sessions:
                sessions.move_to_end(session_id)
                sessions[session_id].used_at = self._clock()
                return sessions[session_id]
        raise UnknownSession(
            "This session is not known here: seed it first. Sessions end with the server and when unused."
        )

    def verified(self, session_id: str) -> None:
        """The session's rollout was judged: it may make room for others."""
        if session_id in self._open:
            self._verified[session_id] = self._open.pop(session_id)

    def _expire(self) -> None:
        oldest = self._clock() - self._idle_seconds
        for sessions in (self._open, self._verified):
            while sessions and next(iter(sessions.values())).used_at < oldest:
                sessions.popitem(last=False)
