"""Whole bodies in and whole replies out, for applications written in bare ASGI.

Invariant: a body is handed out complete or not at all; work for a caller that has left is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import orjson

T = TypeVar("T")

Application = Callable[[Any, Any, Any], Awaitable[None]]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

JSON = b"application/json"


class ClientGone(Exception):
    """The caller closed the connection; no reply can be sent. `BodyLimit` ends the request."""


async def read_body(receive: Callable[[], Awaitable[Any]]) -> bytes:
    """The request's whole body.

    Raises:
        ClientGone: it did not come to its end.
    """
    chunks = []
    while (message := await receive())["type"] == "http.request":
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)
    raise ClientGone


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the caller leaves.

    Raises:
        ClientGone: the caller left first.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def reply(
    send: Callable[[Any], Awaitable[None]],
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    *headers: tuple[bytes, bytes],
) -> None:
    """Send a whole reply."""
    standard = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*standard, *headers]})
    await send({"type": "http.response.body", "body": body})


async def reply_json(send: Send, status: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    """Send a value as JSON."""
    await reply(send, status, orjson.dumps(value), JSON, *headers)


async def reply_error(send: Send, status: int, code: str, text: str, parameter: str | None = None) -> None:
    """Send an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    await reply_json(send, status, {"error": {"message": text, "type": kind, "code": code, "param": parameter}})
