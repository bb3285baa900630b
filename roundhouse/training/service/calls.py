"""Which call of a session is done: a lost answer is given again, work is never done twice.

Invariant: call n is done only after call n - 1 was answered, and at most once. A client that did not get its answer repeats
the call with the same number and the same body and gets the recorded one; so nothing that the network does can apply an
update twice or out of order.

    number   last answered 6
    6        the recorded answer, when the body is the same; else refused
    7        to be done
    others   refused: a call is missing in between, or it belongs to the past
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from roundhouse.errors import DataError


class CallRefused(DataError):
    """A call's number or body does not follow from the calls before it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said, to be said again."""

    status: int
    body: bytes
    media_type: str


class CallLog:
    """The calls of one session. Only the last answer is kept: a client has one call under way."""

    def __init__(self) -> None:
        self._last = 0
        self._digest = ""
        self._answer: Answer | None = None

    def admit(self, number: int, verb: str, body: bytes) -> Answer | None:
        """The recorded answer of a repeated call; None when the call is to be done.

        Raises:
            CallRefused: the number is neither the last one nor the next, or a repeated call differs from the first.
        """
        if number == self._last + 1:
            return None
        if number != self._last or self._answer is None:
            raise CallRefused(
                f"Call {number} ({verb}) does not follow call {self._last}, the last that was answered. Open a new session and "
                "load a checkpoint."
            )
        if _digest(verb, body) != self._digest:
            raise CallRefused(f"Call {number} was made before with another content. Open a new session.")
        return self._answer

    def record(self, number: int, verb: str, body: bytes, answer: Answer) -> None:
        """The call was done."""
        self._last, self._digest, self._answer = number, _digest(verb, body), answer


def _digest(verb: str, body: bytes) -> str:
    return hashlib.sha256(verb.encode() + b"\0" + body).hexdigest()
