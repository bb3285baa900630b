"""A limit on the bodies of requests, for every server of ours, as ASGI middleware.

Invariant: an application never gets to hold more of a body than the limit; who sends more is answered 413, from the first byte
where the length is announced. Bodies are taken as they are sent: nothing is unpacked, so a small body stays small.

The limit is 256 MiB, or ROUNDHOUSE_MAX_BODY_MIB.
"""

from __future__ import annotations

import json
import os
from typing import Any

from roundhouse.errors import ConfigError
from roundhouse.http.asgi import Application, ClientGone, Receive, Scope, Send

MEBIBYTES = 256
VARIABLE = "ROUNDHOUSE_MAX_BODY_MIB"


class _TooLarge(Exception):
    """Ends the application's reading."""


class BodyLimit:
    """An ASGI application behind the limit."""

    def __init__(self, app: Application, limit: int | None = None) -> None:
        self._app = app
        self._limit = _limit() if limit is None else limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _announced(scope) > self._limit:
            await self._refuse(send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen, answering = 0, False

        async def counted() -> dict[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise _TooLarge
            return message

        async def answered(message: dict[str, Any]) -> None:
            nonlocal answering
            if seen <= self._limit:
                answering = True
                await send(message)

        try:
            await self._app(scope, counted, answered)
        except ClientGone:
            return  # there is nothing to answer
        except Exception:
            if seen <= self._limit:
                raise
        if seen > self._limit and not answering:
            await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        text = f"The body is larger than {self._limit} bytes. Send less, or start the server with a larger {VARIABLE}."
        await refuse(send, 413, "body_too_large", text)


async def refuse(send: Send, status: int, code: str, text: str) -> None:
    """Answer instead of the application, which has not begun to; the rest of the request is not read."""
    body = json.dumps({"error": {"message": text, "code": code}}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _announced(scope: Scope) -> int:
    given = dict(scope["headers"]).get(b"content-length", b"0")
    return int(given) if given.isdigit() and len(given) < 19 else 0


def _limit() -> int:
    given = os.environ.get(VARIABLE, str(MEBIBYTES))
    if not given.isdecimal() or not 0 < int(given) < 2**20:
        raise ConfigError(f"{VARIABLE} is {given!r}: give a whole number of MiB.")
    return int(given) * 2**20
