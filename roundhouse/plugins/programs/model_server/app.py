"""The model server: three dialects in front of one or more engines, as a bare ASGI application.

Invariant: every answer, of any status, sends the session cookie again, and a session's calls go to one engine as long
as that lives. Every call ends within the configured time, with an answer or a typed error. A stream replays a whole
answer. Token arrays are read and written as JSON once, and never validated number by number.

    POST /v1/responses          strict: unknown fields are refused
    POST /v1/chat/completions   unknown fields are ignored
    POST /v1/messages           Anthropic's dialect
    GET  /v1/models             the one model
    GET  /                      {"status": "ok"}
    GET  /health                the engines; 503 when all are out
    GET, DELETE /captures/<id>  calls recorded under /ng-rollout/<id>/training-token-capture/…

A raw ASGI callable, no web framework: with an instant engine the framework would cost more than the translation.

Bodies, replies and errors of the model server as ASGI messages.

Invariant: every error has a body that a client of its dialect can read, and a status that shows whether a retry may
help:
502, 503 and 504 may, 422 and 400 may not.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from roundhouse.errors import InfraError
from roundhouse.generation.protocol import (
    Body,
    ContextOverflow,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    InvalidRequest,
    check_chat,
    check_responses,
    invalid,
)
from roundhouse.http.asgi import (
    JSON,
    BodyLimit,
    ClientGone,
    host_name,
    is_loopback,
    presents,
    read_body,
    reply,
    while_connected,
)
from roundhouse.http.sessions import StickySession
from roundhouse.plugins.programs.model_server import answer, sse
from roundhouse.plugins.programs.model_server.answer import (
    ModelAnswer,
    as_chat_completion,
    as_response,
    empty_answer,
    read_answer,
)
from roundhouse.plugins.programs.model_server.captures import Captures, http_attempt
from roundhouse.plugins.programs.model_server.engine_call import (
    chat_from_responses,
    ends_in_reasoning_only,
    engine_body,
    reply_digest,
    tokenize_body,
    with_recorded_tokens,
)
from roundhouse.plugins.programs.model_server.engine_client import EngineClient
from roundhouse.plugins.programs.model_server.rollout_paths import KEY, RolloutMark, RolloutPath
from roundhouse.plugins.programs.model_server.section import ModelServerConfig
from roundhouse.plugins.programs.model_server.sse import strict_body, with_namespaces

log = logging.getLogger(__name__)

CAPTURES = "/captures/"
PROXY_HEADERS = {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}
Content = tuple[bytes, bytes]
"""A body and its content type."""
Ask = Callable[[Body], Awaitable[ModelAnswer]]


def build_app(
    config: ModelServerConfig, instance_name: str = "policy_model", engines: Engines | None = None
) -> ASGIApp:
    """The server of a configuration.

    Args:
        instance_name: part of the cookie's name, which must differ between the servers of a rollout.
        engines: clients of the engines; None: those of the configuration.
    """
    cookie = f"{ModelServer.__name__}___{instance_name}"
    app: ASGIApp = ModelServer(config, EngineClient(config) if engines is None else engines)
    app = SessionMiddleware(StickySession(app), secret_key=cookie, session_cookie=cookie)
    return BodyLimit(RolloutPath(app))


class Engines(Protocol):
    """A source of answers: `EngineClient`, or a program's policy."""

    async def complete(self, session: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """A chat completion as JSON, and the engine that made it; errors as of `EngineClient.complete`."""
        ...

    async def tokenize(self, engine: Any, body: dict[str, Any]) -> list[int]: ...

    def health(self) -> list[dict[str, Any]]: ...

    def open(self) -> Any: ...

    async def close(self) -> None: ...


class ModelServer:
    """The routes."""

    def __init__(self, config: ModelServerConfig, engines: Engines) -> None:
        self._config = config
        self._engines = engines
        self._captures = Captures(
            config.capture_max_calls, config.capture_max_mebibytes * 2**20, config.capture_max_age_seconds
        )
        model = {"id": config.model, "object": "model", "created": 0, "owned_by": "roundhouse"}
        self._gets: dict[str, Callable[[], tuple[int, Any]]] = {
            "/": lambda: (200, {"status": "ok"}),
            "/livez": lambda: (200, {"status": "ok"}),
            "/health": self._health,
            "/healthz": self._health,
            "/readyz": self._health,
            "/v1/models": lambda: (200, {"object": "list", "data": [model]}),
        }
        self._dialects: dict[str, Callable[[Any, Ask], Coroutine[Any, Any, Content]]] = {
            "/v1/responses": self._responses,
            "/v1/chat/completions": self._chat,
            "/v1/messages": self._messages,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        method, path = scope["method"], scope["path"]
        if method == "POST" and path in self._dialects:
            await self._call(scope, receive, send)
            return
        if method == "GET" and path in self._gets:
            status, body = self._gets[path]()
        elif path.startswith(CAPTURES):
            status, body = self._captured(scope)
        elif path in self._dialects or path in self._gets:
            status, body = 405, {"detail": "Method Not Allowed"}
        else:
            status, body = 404, {"detail": "Not Found"}
        await reply(send, status, orjson.dumps(body))

    # -- calls ------------------------------------------------------------------------------------------------------

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One model call; here every error becomes a reply."""
        mark: RolloutMark = scope[KEY]
        session: str = (
            mark.rollout or scope["session"]["session_id"]
        )  # SDKs keep no cookies, but the path they are given
        anthropic_dialect = scope["path"] == "/v1/messages"

        async def ask(chat: Body) -> ModelAnswer:
            if mark.rollout is None or not (mark.capture or self._config.capture_all):
                return await self._complete(chat, session, tokens=self._config.return_token_id_information)
            attempt = http_attempt(dict(scope["headers"]), chat)
            if self._config.capture_continues:
                chat = with_recorded_tokens(chat, partial(self._captures.recall, mark.rollout))
            number = self._captures.begin(mark.rollout, attempt)
            try:
                answer = await self._complete(chat, session, tokens=True)
            except BaseException:
                self._captures.abandon(mark.rollout, number)
                raise
            self._captures.record(mark.rollout, number, answer, reply_digest(chat, answer.message))
            return answer

        try:
            body = await read_json(receive)
            content, kind = await while_connected(receive, self._dialects[scope["path"]](body, ask))
        except ClientGone:
            return
        except Exception as error:
            status, error_body = (anthropic_error_reply if anthropic_dialect else error_reply)(error)
            if status == 500:
                log.exception("%s raised", scope["path"])
            await reply(send, status, orjson.dumps(error_body, default=repr))
        else:
            await reply(send, 200, content, kind)

    async def _responses(self, body: Any, ask: Ask) -> Content:
        if not isinstance(body, dict) or body.get("stream") is not True:
            chat = chat_from_responses(check_responses(body))
            return orjson.dumps(as_response(await ask(chat), body, self._config)), JSON
        request, namespaces = strict_body(body)
        chat = chat_from_responses(check_responses(request))
        try:
            response = as_response(await ask(chat), request, self._config)
        except InvalidRequest:
            raise
        except Exception as error:  # noqa: BLE001 (the stream's border: its clients read failures from events)
            log.warning("A streamed response failed: %r", error)
            return sse.responses_failure(str(error)), EVENTS
        return sse.responses_events(with_namespaces(response, namespaces)), EVENTS

    async def _chat(self, body: Any, ask: Ask) -> Content:
        completion = as_chat_completion(await ask(check_chat(body)), self._config)
        if body.get("stream") is not True:
            return orjson.dumps(completion), JSON
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return sse.chat_chunks(completion, include_usage=include_usage), EVENTS

    async def _messages(self, body: Any, ask: Ask) -> Content:
        request = answer.responses_body(body)
        response = as_response(await ask(chat_from_responses(check_responses(request))), request, self._config)
        message = answer.message_object(response, body.get("model") or self._config.model)
        return (sse.messages_events(message), EVENTS) if body.get("stream") is True else (orjson.dumps(message), JSON)

    async def _complete(self, chat: Body, session: str, *, tokens: bool) -> ModelAnswer:
        body = engine_body(chat, self._config, tokens=tokens)
        if not self._config.sequential_reasoning_allowed and ends_in_reasoning_only(body):
            return empty_answer(self._config.model, "content_filter")
        try:
            engine, completion = await self._engines.complete(session, body)
        except ContextOverflow:
            return empty_answer(self._config.model, "length")
        answer = read_answer(completion, self._config, tokens=tokens)
        if answer.tokens is not None and answer.tokens.prompt is None:
            answer.tokens.prompt = await self._engines.tokenize(engine, tokenize_body(body))
        return answer

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _health(self) -> tuple[int, Any]:
        engines = self._engines.health()
        alive = any(engine["state"] == "in" for engine in engines)
        captures = {"calls": self._captures.calls, "bytes": self._captures.bytes}
        return 200 if alive else 503, {"status": "ok" if alive else "down", "engines": engines, "captures": captures}

    def _captured(self, scope: Scope) -> tuple[int, Any]:
        rollout = scope["path"].removeprefix(CAPTURES)
        if self._config.capture_token is None:
            # A program of this machine asks: its address is a loopback one (none: a local socket), no reverse proxy here
            # forwards requests of others, and the host name in the request is not that of a site which points here.
            headers = dict(scope["headers"])
            caller = (scope.get("client") or ("",))[0]
            host = host_name(headers.get(b"host", b"localhost").decode("latin-1"))
            allowed = (caller == "" or is_loopback(caller)) and is_loopback(host) and not PROXY_HEADERS & headers.keys()
        else:
            authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            allowed = presents(authorization, self._config.capture_token.get_secret_value())
        if not allowed:
            return 403, {
                "detail": "Captures answer to their bearer token, or on this machine only where none is configured."
            }
        if scope["method"] == "GET":
            record = self._captures.read(rollout)
            return (404, {"detail": f"No call was recorded for {rollout}."}) if record is None else (200, record)
        if scope["method"] == "DELETE":
            return 200, {"deleted": self._captures.delete(rollout)}
        return 405, {"detail": "Method Not Allowed"}

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._engines.open()
            else:
                await self._engines.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


EVENTS = b"text/event-stream; charset=utf-8"


async def read_json(receive: Receive) -> Any:
    """The request's body.

    Raises:
        InvalidRequest: it is not JSON.
        ClientGone: it did not come to its end.
    """
    raw = await read_body(receive)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid([error.pos], f"JSON decode error: {error.msg}") from error


def error_reply(error: Exception) -> tuple[int, Any]:
    """Return status and JSON body of an error. A defect of Roundhouse is reported as NeMo Gym does: 500, the
    exception as a JSON string."""
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
