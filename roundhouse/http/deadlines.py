"""The time limit of a reply's headers, for the clients of `httpx`: their own limits hold for one read each.

Invariant: the reads from a request to the end of its reply's headers share the time of one read, however slowly their
bytes arrive and however many interim replies (100 Continue) come first. The body has the limit of `roundhouse.http.replies`.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any


class TimedStream:
    """A connection that counts the time since the last write."""

    def __init__(self, stream: Any, error: type[Exception]) -> None:
        self._stream, self._error = stream, error
        self._deadline: float | None = None
        self._has_headers = False

    def end_headers(self) -> None:
        """Count no more until the next request."""
        self._has_headers = True

    def _left(self, timeout: float | None) -> float | None:
        if timeout is None or self._has_headers:
            return timeout
        now = time.monotonic()
        self._deadline = self._deadline or now + timeout
        if now >= self._deadline:
            raise self._error(f"the reply's headers have not come within {timeout:g} s")
        return self._deadline - now

    def _restart(self) -> None:
        self._deadline, self._has_headers = None, False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = self._stream.read(max_bytes, self._left(timeout))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._restart()
        self._stream.write(buffer, timeout)

    def start_tls(self, *arguments: Any, **options: Any) -> Any:
        return type(self)(self._stream.start_tls(*arguments, **options), self._error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class AsyncTimedStream(TimedStream):
    """The same for asynchronous clients."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # type: ignore[override]
        data: bytes = await self._stream.read(max_bytes, self._left(timeout))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # type: ignore[override]
        self._restart()
        await self._stream.write(buffer, timeout)

    async def start_tls(self, *arguments: Any, **options: Any) -> Any:
        return type(self)(await self._stream.start_tls(*arguments, **options), self._error)


class TimedBackend:
    """Makes the connections of a client."""

    def __init__(self, backend: Any, error: type[Exception]) -> None:
        self._backend, self._error = backend, error

    def connect_tcp(self, *arguments: Any, **options: Any) -> Any:
        return TimedStream(self._backend.connect_tcp(*arguments, **options), self._error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class AsyncTimedBackend(TimedBackend):
    """The same for asynchronous clients."""

    async def connect_tcp(self, *arguments: Any, **options: Any) -> Any:
        return AsyncTimedStream(await self._backend.connect_tcp(*arguments, **options), self._error)


def limit_headers(client: Any, backend: type[TimedBackend]) -> None:
    """Put the limit on a client's connections, those through proxies included."""
    for transport in (client._transport, *client._mounts.values()):
        if (pool := getattr(transport, "_pool", None)) is not None:
            library = import_module(type(pool).__module__.partition(".")[0])  # httpcore, or that of httpx2
            pool._network_backend = backend(pool._network_backend, library.ReadTimeout)


def end_headers(response: Any) -> None:
    """Report the end of a reply's headers to its connection."""
    if isinstance(stream := response.extensions.get("network_stream"), TimedStream):
        stream.end_headers()
