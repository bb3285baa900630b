"""ASGI middleware of every server: complete bodies and replies, a body limit, no requests from foreign web pages.

Invariants: a body is passed on complete or not at all, and never beyond the limit: a larger one is answered 413, at
once if its length is announced. Work for a disconnected caller is cancelled. A page's request is answered only if this
server served the page: a browser sends any site's requests to the loopback interface as well, so listening there does
not protect from an open page.

    Host                     a name of another site that points here (DNS rebinding): 421
    Origin, Sec-Fetch-Site   a page of another site or of another port: 403, for a websocket too

A followed link (GET, into a new tab) is answered. Programs send neither `Origin` nor `Sec-Fetch-Site` and pass.

A loopback server answers to the loopback names and those in ROUNDHOUSE_ALLOWED_HOSTS (comma-separated), such as a
reverse proxy's. A server on other interfaces cannot know its names, such as a Service's: it answers to any name, or, if
the variable is set, to listed names and to addresses, which cannot be rebound. The body limit is 256 MiB or
ROUNDHOUSE_MAX_BODY_MIB, counted as sent, without decompression.
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
    """Return the request's whole body.

    Raises:
        ClientGone: the caller disconnected before the end of the body.
    """
    chunks = []
    while (message := await receive())["type"] == "http.request":
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)
    raise ClientGone


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; cancel the work if the caller disconnects.

    Raises:
        ClientGone: the caller disconnected first.
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
    """Middleware that limits the size of request bodies."""

    def __init__(self, app: Application, limit: int | None = None) -> None:
        self._app = app
        self._limit = body_limit() if limit is None else limit

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
            return None  # nobody waits for an answer
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
    """Answer in place of the application, before it has sent anything; the rest of the request is not read."""
    body = orjson.dumps({"error": {"message": text, "code": code}})
    headers = [(b"content-type", JSON), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def body_limit() -> int:
    """Return the limit of a body in bytes.

    Raises:
        ConfigError: the variable is not an integer.
    """
    value = os.environ.get(BODY_LIMIT, str(MEBIBYTES))
    if not value.isdecimal() or not 0 < int(value) < 2**20:
        raise ConfigError(f"{BODY_LIMIT} is {value!r}: give a whole number of MiB.")
    return int(value) * 2**20


ALLOWED_HOSTS = "ROUNDHOUSE_ALLOWED_HOSTS"


class SameOrigin:
    """Middleware that admits programs and pages of this server; it refuses pages of other sites and unknown names in
    `Host`.
    """

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
        # A link followed into a new tab: its page cannot read the reply, and a GET changes nothing
        into_tab = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document")
        if is_foreign and not (into_tab and scope.get("method") == "GET"):
            return 403, "foreign_origin", "A page of another site may not use this server."
        return None

    def _answers_to(self, name: str) -> bool:
        if name in self._names or name in self._listed or (self._is_local and is_loopback(name)):
            return True
        return not self._is_local and (not self._listed or _is_address(name) or name == "localhost")


def presents(authorization: bytes | str, token: str) -> bool:
    """Return whether the header is `Bearer <token>`; compared in constant time."""
    header = authorization.encode() if isinstance(authorization, str) else authorization
    return hmac.compare_digest(header, f"Bearer {token}".encode())


def token_digest(token: str) -> str:
    """Return the SHA-256 of a bearer token. A server that stores the digest alone can check the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def presents_digested(authorization: str, digest: str) -> bool:
    """Return whether the header is `Bearer <token>` with a token of this `token_digest`."""
    scheme, _, token = authorization.partition(" ")
    return scheme == "Bearer" and hmac.compare_digest(token_digest(token), digest)


async def authorized(scope: Scope, send: Send, token: str | None, name: str) -> bool:
    """Return whether the request carries the token (None requires none); otherwise answer 401 and name `name`."""
    header = dict(scope["headers"]).get(b"authorization", b"")
    if token is None or presents(header, token):
        return True
    await reply_error(send, 401, "unauthorized", f"Send {name} as a bearer token.")
    return False


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable only from this machine."""
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def host_name(host: str) -> str:
    """Return a `Host` without the port, and an IPv6 address without its brackets."""
    name, _, port = host.rpartition(":")
    name = name if name and port.isdecimal() else host
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


KEEP_ALIVE_SECONDS = 30
"""As in NeMo Gym's servers: longer than its clients keep an idle connection (15 s)."""


def serve(app: Application, host: str, port: int, **options: Any) -> None:
    """Serve until interrupted. `options` are uvicorn's."""
    import uvicorn  # only a server's own process serves

    settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_keep_alive": KEEP_ALIVE_SECONDS}
    uvicorn.run(SameOrigin(app, host), host=host, port=port, **(settings | options))
