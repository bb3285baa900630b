"""Who may use a train service: one session at a time.

Invariant: at any time at most one session is valid, and a session that was replaced is never valid again. A session ends when
it is closed, when nothing was heard of it for `idle_seconds`, or when its own owner opens another one: an owner that
opens a session has lost the one before (its process died), and must not wait for it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from roundhouse.errors import InfraError


class LeaseHeld(InfraError):
    """Another owner uses the service."""


class SessionLost(InfraError):
    """The session is not the valid one: the service was restarted, or the session ended."""


@dataclass(slots=True)
class Session:
    """A valid session."""

    token: str
    owner: str
    heard_at: float
    """Seconds of a monotonic clock."""


class Lease:
    """The service's only session."""

    def __init__(self, idle_seconds: float) -> None:
        self.idle_seconds = idle_seconds
        self.opened = 0
        """Sessions so far."""
        self._session: Session | None = None

    def open(self, owner: str, now: float) -> Session:
        """A new session for the owner.

        Raises:
            LeaseHeld: another owner's session is valid.
        """
        held = self._session
        if held is not None and held.owner != owner and now < held.heard_at + self.idle_seconds:
            left = held.heard_at + self.idle_seconds - now
            raise LeaseHeld(
                f"The train service is used by {held.owner!r}, for {left:.0f} seconds more unless it goes on. Stop that run, "
                "or start another service."
            )
        self.opened += 1
        self._session = Session(secrets.token_hex(16), owner, now)
        return self._session

    def require(self, token: str, now: float) -> None:
        """Refuse any but the valid session, and note that it was heard of.

        Raises:
            SessionLost: it is not the valid one.
        """
        held = self._session
        if held is None or not secrets.compare_digest(held.token.encode(), token.encode()):
            raise SessionLost(
                "The train service does not know this session: the service was restarted, or the session ended. Its weights "
                "are lost; begin again from the checkpoint."
            )
        held.heard_at = now

    def close(self, token: str) -> None:
        """End the session, if it is the valid one."""
        if self._session is not None and secrets.compare_digest(self._session.token.encode(), token.encode()):
            self._session = None
