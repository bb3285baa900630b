"""Bodies, replies and errors of the model server as ASGI messages.

Invariant: every error has a body that a client of its dialect can read, and a status that tells whether asking again may help:
422 and 400 will not, 502, 503 and 504 may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from starlette.types import Receive, Send

from roundhouse.compat.nemo_gym.model_server.requests import InvalidRequest, invalid
from roundhouse.errors import InfraError
from roundhouse.generation.protocol import EngineRejected, EngineTimeout, EngineUnreachable

T = TypeVar("T")

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The caller closed the connection; nobody wants the answer."""


async def read_json(receive: Receive) -> Any:
    """The request's body.

    Raises:
        InvalidRequest: it is not JSON.
        ClientGone: it did not come to its end.
    """
    chunks = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    try:
        return orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise invalid([error.pos], f"JSON decode error: {error.msg}") from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
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


async def reply(send: Send, status: int, body: bytes, content_type: bytes = JSON) -> None:
    """Send a whole reply."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_reply(error: Exception) -> tuple[int, Any]:
    """Status and JSON body of an error. A defect of ours is told as NeMo Gym does: 500, the exception as a JSON string."""
    if isinstance(error, InvalidRequest):
        return 422, {"detail": error.problems}
    if isinstance(error, EngineUnreachable):
        return 503, _error("engines_unreachable", error)
    if isinstance(error, EngineTimeout):
        return 504, _error("engine_timeout", error)
    if isinstance(error, EngineRejected):
        return 400, _error("engine_rejected", error)
    if isinstance(error, InfraError):
        return 502, _error("engine_failed", error)
    return 500, repr(error)


def anthropic_error_reply(error: Exception) -> tuple[int, Any]:
    """The same in the Messages dialect."""
    status, _ = error_reply(error)
    kind = "invalid_request_error" if status < 500 else "overloaded_error" if status == 503 else "api_error"
    return 400 if status == 422 else status, {"type": "error", "error": {"type": kind, "message": str(error)}}


def _error(code: str, error: Exception) -> dict[str, Any]:
    kind = "server_error" if isinstance(error, InfraError) else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "code": code, "param": None}}
