"""The train service over HTTP: `roundhouse train-server --model DIR --host HOST --port PORT`.

Invariant: every verb needs the valid session, one runs at a time, and none runs twice for the same call. Beyond the
loopback interface the server requires a bearer token (environment variable ROUNDHOUSE_TRAIN_TOKEN, or --token-file),
and then refuses control calls without it.

The server holds one model at a time, of the architecture of `--model` if that is given. Its weights are in memory:
after a restart all sessions are unknown, which the client reports as a lost service, and training resumes from the last
checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from roundhouse.imports import gc_paused

with gc_paused():
    import uvicorn
    from fastapi import FastAPI, Request, Response

    from roundhouse.config.training import TOKEN_VARIABLE
    from roundhouse.errors import ConfigError, DataError, RoundhouseError
    from roundhouse.http.asgi import SameOrigin, is_loopback, presents_digested, token_digest
    from roundhouse.training.service import protocol
    from roundhouse.training.service.protocol import CallLog, CallReply, SessionLease
    from roundhouse.training.service.served import ServedTrainEngine

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Service:
    """The server's state: lease, calls, engine. Its methods are the routes."""

    def __init__(
        self, engine: ServedTrainEngine, *, token_sha256: str | None, idle_seconds: float, max_body_bytes: int
    ) -> None:
        """`token_sha256` is the `token_digest` of the bearer token; None asks for none."""
        self.engine, self.token_sha256, self.max_body_bytes = engine, token_sha256, max_body_bytes
        self.heard_at = time.monotonic()
        """When the last call came that was authorized."""
        self.is_over = False
        """Whether calls are refused because the server is about to end."""
        self.lease = SessionLease(idle_seconds)
        self.calls = CallLog()
        self.turn = asyncio.Lock()
        """Held by the call that runs."""
        self.thread = ThreadPoolExecutor(1, "train")
        """Everything that touches the model runs here: torch's settings are by thread."""

    def authorize(self, request: Request) -> None:
        """Refuse a call that lacks our client's header or the token."""
        header = request.headers.get("authorization", "")
        if self.token_sha256 is not None and not presents_digested(header, self.token_sha256):
            raise protocol.Unauthorized(
                "The train service needs its bearer token. Set the token of the server's start."
            )
        if (spoken := request.headers.get(protocol.PROTOCOL_HEADER)) != protocol.PROTOCOL:
            raise ConfigError(
                f"The header {protocol.PROTOCOL_HEADER} is {spoken!r}, this server speaks {protocol.PROTOCOL!r}. Run the same "
                "version of roundhouse on both sides."
            )
        if self.is_over:
            raise protocol.SessionLost("The server ends: it had heard nothing of its client for too long.")
        self.heard_at = time.monotonic()

    async def open(self, request: Request) -> Response:
        opening = protocol.parse(protocol.OpenSession, await self._read(request))
        async with self.turn:
            session = self.lease.open(opening.owner, time.monotonic())
            self.calls = CallLog()
            try:
                await self._on_thread(lambda: self.engine.begin(opening.config, opening.temperature))
            except BaseException:
                self.lease.close(session.token)  # nobody received the token
                raise
        logger.info("session of %s", opening.owner)
        opened = protocol.SessionOpened(session=session.token, idle_seconds=self.lease.idle_seconds)
        return Response(opened.model_dump_json(), media_type="application/json")

    async def close(self, request: Request) -> Response:
        async with self.turn:
            self._require_session(request)
            self.lease.close(request.headers[protocol.SESSION_HEADER])
            await self._on_thread(self.engine.end)
        return Response(status_code=204)

    async def read(self, request: Request, verb: str) -> Response:
        """A call that changes nothing."""
        self._require_session(request)
        body = await self._read(request)
        async with self.turn:
            self._require_session(request)
            answer = await self._on_thread(lambda: self.engine.answer(verb, body))
            self._require_session(request)  # a call may have taken longer than the lease allows silence
            return _response(answer)

    async def change(self, request: Request, verb: str) -> Response:
        """A call that changes something: once, or its recorded answer."""
        self._require_session(request)
        number = request.headers.get(protocol.NUMBER_HEADER, "")
        if not number.isdecimal() or len(number) > 18:
            raise DataError(
                f"The header {protocol.NUMBER_HEADER} is {number[:40]!r}; a call that changes something has a number."
            )
        body = await self._read(request)
        async with self.turn:
            self._require_session(request)
            answer = self.calls.admit(int(number), verb, body)
            if answer is None:
                answer = await self._on_thread(lambda: self.engine.answer(verb, body))
                self.calls.record(int(number), verb, body, answer)
            self._require_session(request)
            return _response(answer)

    def _require_session(self, request: Request) -> None:
        self.lease.require(request.headers.get(protocol.SESSION_HEADER, ""), time.monotonic())

    async def _read(self, request: Request) -> bytes:
        """The body, up to the limit."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body_bytes:
                raise DataError(
                    f"The request is larger than {self.max_body_bytes} bytes. Raise train.minibatches, or start the server "
                    "with a larger --max-body-mib."
                )
        return bytes(body)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)


def build_app(service: Service) -> FastAPI:
    """The routes of `protocol`."""
    app = FastAPI(title="roundhouse train service", openapi_url=None)

    @app.middleware("http")
    async def border(request: Request, forward: Callable[[Request], Awaitable[Response]]) -> Response:
        try:
            if request.url.path != "/health":
                service.authorize(request)
            return await forward(request)
        except RoundhouseError as error:
            return _response(protocol.refusal(error))

    @app.exception_handler(RoundhouseError)
    async def refused(request: Request, error: RoundhouseError) -> Response:
        return _response(protocol.refusal(error))

    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/v1/alive", _health, methods=["GET"])
    app.add_api_route("/v1/session", service.open, methods=["POST"])
    app.add_api_route("/v1/session", service.close, methods=["DELETE"])
    for verb in protocol.READING:
        app.add_api_route(f"/v1/{verb}", _route(service.read, verb), methods=["POST"])
    for verb in protocol.CHANGING:
        app.add_api_route(f"/v1/{verb}", _route(service.change, verb), methods=["POST"])
    return app


def _route(work: Callable[[Request, str], Awaitable[Response]], verb: str) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await work(request, verb)

    return route


async def _health() -> dict[str, str]:
    return {"status": "ok"}


def _response(answer: CallReply) -> Response:
    return Response(answer.body, answer.status, media_type=answer.media_type)


def serve(
    engine: ServedTrainEngine, host: str, port: int, *, token: str | None, idle_seconds: float, max_body_bytes: int
) -> None:
    """Serve until this process is ended; then end the engine.

    Raises:
        ConfigError: others can reach the address, and a token is missing.
        SystemExit: the process got SIGTERM, which uvicorn raises again after it has closed.
    """
    require_token_beyond_loopback(host, token)
    known = None if token is None else token_digest(token)
    service = Service(engine, token_sha256=known, idle_seconds=idle_seconds, max_body_bytes=max_body_bytes)
    signal.signal(signal.SIGTERM, _leave)
    try:
        uvicorn.run(SameOrigin(build_app(service), host), host=host, port=port, log_level="warning")
    finally:
        engine.end()


def _leave(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would cut the cleaning up short
    raise SystemExit(128 + signal.SIGTERM)


def require_token_beyond_loopback(host: str, token: str | None) -> None:
    """Refuse to listen for others without a token."""
    if not is_loopback(host) and token is None:
        raise ConfigError(
            f"--host {host} can be reached from other machines, but no token is set. Set {TOKEN_VARIABLE} or --token-file, or "
            "listen on 127.0.0.1."
        )
