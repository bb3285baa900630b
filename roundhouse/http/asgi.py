"""Middleware of every server, in bare ASGI: whole bodies, whole replies, a limit on bodies, no foreign web pages.

Invariants: a body is handed out complete or not at all, and never more of it than the limit: a larger one is answered 413, from
the first byte where its length is announced. Work for a caller that has left is cancelled. A request that a browser makes for a
page is answered only where this server itself served that page: a browser sends any site's requests to the loopback interface
as well, simple ones without asking first, so listening there is no border against a page that its user has open.

    Host                     a name of another site that points here (DNS rebinding): 421
    Origin, Sec-Fetch-Site   a page of another site or of another port: 403, for a websocket too

A link that a person follows (GET, into a tab of its own) is answered wherever it stood. Programs send neither `Origin` nor
`Sec-Fetch-Site` and pass.

A server on the loopback interface answers to the names of that interface, and to those that ROUNDHOUSE_ALLOWED_HOSTS lists (by
commas), such as that of a reverse proxy. A server that listens beyond it cannot know its names, of a Service say: it answers to
any, or, where the variable is set, to those listed and to addresses, which nobody can rebind. The limit on bodies is 256 MiB,
or ROUNDHOUSE_MAX_BODY_MIB; they are counted as sent, nothing is unpacked.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

import orjson

from roundhouse.errors import ConfigError

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


MEBIBYTES = 256
BODY_LIMIT = "ROUNDHOUSE_MAX_BODY_MIB"


class _TooLarge(Exception):
    """Ends the application's reading."""


class BodyLimit:
    """An ASGI application behind the limit."""

    def __init__(self, app: Application, limit: int | None = None) -> None:
        self._app = app
        self._limit = _limit() if limit is None else limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and len(announced) < 19 and int(announced) > self._limit:
            return await self._refuse(send)
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
            return None  # there is nothing to answer
        except Exception:
            if seen <= self._limit:
                raise
        if seen > self._limit and not answering:
            await self._refuse(send)
        return None

    async def _refuse(self, send: Send) -> None:
        text = (
            f"The body is larger than {self._limit} bytes. Send less, or start the server with a larger {BODY_LIMIT}."
        )
        await refuse(send, 413, "body_too_large", text)


async def refuse(send: Send, status: int, code: str, text: str) -> None:
    """Answer instead of the application, which has not begun to; the rest of the request is not read."""
    body = orjson.dumps({"error": {"message": text, "code": code}})
    headers = [(b"content-type", JSON), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _limit() -> int:
    given = os.environ.get(BODY_LIMIT, str(MEBIBYTES))
    if not given.isdecimal() or not 0 < int(given) < 2**20:
        raise ConfigError(f"{BODY_LIMIT} is {given!r}: give a whole number of MiB.")
    return int(given) * 2**20


ALLOWED_HOSTS = "ROUNDHOUSE_ALLOWED_HOSTS"


class SameOrigin:
    """An ASGI application that only its own pages and programs reach."""

    def __init__(self, app: Application, host: str, names: Collection[str] = ()) -> None:
        """
        Args:
            host: the address or name that the server listens on.
            names: more that it answers to.
        """
        self._app = app
        self._is_local = is_loopback(host)
        self._listed = {name.strip().lower() for name in os.environ.get(ALLOWED_HOSTS, "").split(",")} - {""}
        self._names = frozenset(names)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, *refusal)
        else:
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the server answers 403

    def _refusal(self, scope: Any) -> tuple[int, str, str] | None:
        """Status, code and text."""
        hosts, origins, headers = set[str](), set[str](), dict[bytes, bytes]()
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.add(value.decode("latin-1").lower())
            elif name == b"origin":
                origins.add(value.decode("latin-1").lower().partition("://")[2])
            elif name.startswith(b"sec-fetch-"):
                headers[name] = value
        if unknown := [host for host in hosts if not self._answers_to(host_name(host))]:
            text = f"This server does not answer to the name {unknown[0]!r}. Use its address, or list it in {ALLOWED_HOSTS}."
            return 421, "foreign_host", text
        is_foreign = not origins <= hosts or headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none")
        # A link that is followed into a tab of its own: nothing of it can be read where it stood, and a GET changes nothing
        into_tab = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document")
        if is_foreign and not (into_tab and scope.get("method") == "GET"):
            return 403, "foreign_origin", "A page of another site may not use this server."
        return None

    def _answers_to(self, name: str) -> bool:
        if name in self._names or name in self._listed or (self._is_local and is_loopback(name)):
            return True
        return not self._is_local and (not self._listed or _is_address(name) or name == "localhost")


def presents(authorization: bytes | str, token: str) -> bool:
    """Whether the header is `Bearer <token>`; compared in constant time."""
    given = authorization.encode() if isinstance(authorization, str) else authorization
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def token_digest(token: str) -> str:
    """All that a server has to know of a bearer token that cannot be guessed."""
    return hashlib.sha256(token.encode()).hexdigest()


def presents_digested(authorization: str, digest: str) -> bool:
    """Whether the header is `Bearer <token>` with a token of this `token_digest`."""
    scheme, _, token = authorization.partition(" ")
    return scheme == "Bearer" and hmac.compare_digest(token_digest(token), digest)


async def authorized(scope: Scope, send: Send, token: str | None, name: str) -> bool:
    """Whether the request presents the token (None asks for none); otherwise it is answered 401, which says to send `name`."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    if token is None or presents(given, token):
        return True
    await reply_error(send, 401, "unauthorized", f"Send {name} as a bearer token.")
    return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def host_name(host: str) -> str:
    """A `Host` without the port, and an IPv6 address without its brackets."""
    name, _, port = host.rpartition(":")
    name = name if name and port.isdecimal() else host
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
