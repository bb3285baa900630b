"""The limit on the size of replies, for the clients of `roundhouse.http.clients`.

Invariant: no client of Roundhouse holds more of a reply than `ROUNDHOUSE_MAX_BODY_MIB` (256 MiB). A few bytes of gzip
unpack to gigabytes, so replies are requested without compression, and a compressed one is refused unread. A body has
the time limit of one read, however slowly its bytes arrive; a stream of events, if the request accepts one, does not
have this limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from roundhouse.errors import DataError
from roundhouse.http.asgi import BODY_LIMIT, body_limit
from roundhouse.http.deadlines import end_headers

if TYPE_CHECKING:
    import aiohttp

EVENTS = "text/event-stream"
IDENTITY = {"Accept-Encoding": "identity"}


MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of code that reads JSON, or the fields of an object, from a reply that holds something else."""


class ReplyRefused(DataError):
    """A server's reply is larger than the limit, or compressed."""


async def read_reply(reply: aiohttp.ClientResponse) -> bytes:
    """Return the whole body of a reply.

    Raises:
        ReplyRefused: it is larger than the limit, or compressed.
    """
    limit = _checked(reply.headers, str(reply.url))
    chunks, size = [], 0
    async for chunk in reply.content.iter_any():
        size += len(chunk)
        if size > limit:
            raise _too_large(str(reply.url), limit)
        chunks.append(chunk)
    return b"".join(chunks)


def limit_hooks(httpx: ModuleType) -> tuple[Callable[[Any], None], Callable[[Any], Any]]:
    """Return hooks for clients and for asynchronous clients of `httpx`, which put the limit around the stream of each reply."""

    class Limited(httpx.SyncByteStream, httpx.AsyncByteStream):  # type: ignore[name-defined]
        def __init__(self, response: Any) -> None:
            self.stream, self.headers, self.url = response.stream, response.headers, str(response.url)
            self.size = 0
            self.request = response.request
            limits = self.request.extensions.get("timeout") or {}
            self.seconds = math.inf if _is_event_stream(response) else limits.get("read") or math.inf
            self.deadline = time.monotonic() + self.seconds

        def _counted(self, chunk: bytes, limit: int) -> bytes:
            self.size += len(chunk)
            if self.size > limit:
                raise _too_large(self.url, limit)
            if time.monotonic() > self.deadline:
                text = f"{self.url} has not sent the whole reply {self.seconds:g} s after its beginning"
                raise httpx.ReadTimeout(text, request=self.request)
            return chunk

        def __iter__(self) -> Iterator[bytes]:
            limit = _checked(self.headers, self.url)
            for chunk in self.stream:
                yield self._counted(chunk, limit)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            limit = _checked(self.headers, self.url)
            async for chunk in self.stream:
                yield self._counted(chunk, limit)

        def close(self) -> None:
            self.stream.close()

        async def aclose(self) -> None:
            await self.stream.aclose()

    def limit(response: Any) -> None:
        end_headers(response)
        response.stream = Limited(response)
        response.encoding = "utf-8"  # Python does not decode text by each charset that a reply may name

    async def limit_async(response: Any) -> None:
        limit(response)

    return limit, limit_async


def _is_event_stream(response: Any) -> bool:
    kind, accepted = response.headers.get("Content-Type") or "", response.request.headers.get("Accept") or ""
    return str(kind).startswith(EVENTS) and EVENTS in accepted


def _checked(headers: Mapping[str, str], url: str) -> int:
    """Return the limit in bytes, if the headers announce a reply that may be read."""
    if (encoding := headers.get("Content-Encoding") or "identity").lower() != "identity":
        raise ReplyRefused(
            f"{url} sends its reply with Content-Encoding {encoding!r}, although none was accepted: its size is unknown until "
            "it is unpacked. Turn compression off there."
        )
    limit = body_limit()
    announced = headers.get("Content-Length") or "0"
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(url, limit)
    return limit


def _too_large(url: str, limit: int) -> ReplyRefused:
    return ReplyRefused(
        f"{url} sends more than {limit // 2**20} MiB, the limit of a reply. To allow more, raise {BODY_LIMIT} in this "
        "process's environment."
    )
