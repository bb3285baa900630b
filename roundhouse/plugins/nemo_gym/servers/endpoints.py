"""Shared parts of our environment servers: request bodies, replies, errors as replies, names of rollouts and metrics.

Invariant: a handler that raises an `InfraError` answers 503 with `X-Roundhouse-Failure: infra`. Any other exception is a 500
with the exception as a JSON string and `X-Roundhouse-Failure: data`. Each request has a time limit: nothing else stops a tool
that hangs after its caller left.

Servers file the calls of a rollout under the name that NeMo Gym's collector reads: the row's `_ng_rollout_id`, else its task
and rollout index, followed by the attempt number from the second attempt on.

    {"_ng_task_index": 3, "_ng_rollout_index": 0}                           3-0
    {"_ng_rollout_id": "abc", "_ng_attempt_index": 2}                       abc-a2

Metrics: all tools share one route label, because the policy chooses the names of tools.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Gauge, Histogram
from starlette.middleware.sessions import SessionMiddleware

from roundhouse.environments.base import ToolResult, bad_request, raised
from roundhouse.errors import InfraError
from roundhouse.http.asgi import BodyLimit
from roundhouse.http.sessions import StickySession
from roundhouse.plugins.programs.model_server.rollout_paths import RolloutPath
from roundhouse.rollout.protocol import FAILURE_HEADER, BadTaskRow

log = logging.getLogger(__name__)

REQUEST_SECONDS = 600.0

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


class RequestTimeout(InfraError):
    """The environment's code did not return."""


class BadBody(Exception):
    """The body of the request is not valid for the route."""

    def __init__(self, answer: ToolResult) -> None:
        self.answer = answer


async def within(seconds: float, work: Awaitable[T], path: str) -> T:
    """Return the result of `work`, within a time limit.

    Raises:
        RequestTimeout: `work` took longer; the message names `path`.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise RequestTimeout(f"{path} did not return within {seconds:g} s.") from error
        raise


def guarded(endpoint: Endpoint, seconds: float) -> Endpoint:
    """Wrap an endpoint: exceptions become the answers of the contract."""

    async def answered(request: Request) -> Response:
        try:
            return await within(seconds, endpoint(request), request.url.path)
        except BadBody as error:
            return answer(error.answer)
        except InfraError as error:
            result = raised(error)
            return Response(result.text, 503, {FAILURE_HEADER: "infra"}, "application/json")
        except Exception as error:  # ends the request: the contract answers with the exception's text
            log.exception("%s raised", request.url.path)
            reply = answer(raised(error))
            reply.headers[FAILURE_HEADER] = "data"  # as the same error in process: the row fails in the same way again
            return reply

    return answered


def with_sessions(app: FastAPI, class_name: str, name: str) -> None:
    """Add sessions to `app`, by a cookie `<class>___<instance name>` in every answer."""
    cookie = f"{class_name}___{name}"
    app.add_middleware(StickySession)
    app.add_middleware(SessionMiddleware, secret_key=cookie, session_cookie=cookie)
    app.add_middleware(RolloutPath)
    app.add_middleware(BodyLimit)


async def json_body(request: Request) -> Any:
    """Return the JSON value of the body.

    Raises:
        BadBody: the body is not JSON.
    """
    raw = await request.body()
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": [error.pos], "msg": "JSON decode error", "input": {}}
        raise BadBody(bad_request([detail | {"ctx": {"error": error.msg}}])) from error


async def object_body(request: Request, *required: str) -> dict[str, Any]:
    """Return the JSON object of the body, with the `required` fields.

    Raises:
        BadBody: the body is not an object, or a field is missing.
    """
    body = await json_body(request)
    if not isinstance(body, dict):
        detail = {"type": "dict_type", "loc": [], "msg": "Input should be a valid dictionary", "input": body}
        raise BadBody(bad_request([detail]))
    missing = [name for name in required if name not in body]
    if missing:
        details = [{"type": "missing", "loc": [name], "msg": "Field required", "input": body} for name in missing]
        raise BadBody(bad_request(details))
    return body


LIVENESS = ("/", "/health", "/healthz", "/livez", "/readyz")
"""Paths of liveness probes; NeMo Gym's servers have them from 0.7."""


def add_liveness(app: FastAPI) -> None:
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    for path in LIVENESS:
        app.get(path, include_in_schema=False)(alive)


def answer(result: ToolResult) -> Response:
    """Convert a tool's result to an HTTP reply."""
    return Response(result.text, result.status, media_type="application/json" if result.is_json else "text/plain")


def json_answer(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def rollout_id(row: Mapping[str, Any]) -> str | None:
    """Return the name of the rollout, or None if the row has neither an id nor indices.

    Raises:
        BadTaskRow: `_ng_rollout_id` cannot be part of a path, or `_ng_attempt_index` is not a number.
    """
    name = row.get("_ng_rollout_id")
    if name is None:
        task, rollout = row.get("_ng_task_index"), row.get("_ng_rollout_index")
        if task is None or rollout is None:
            return None
        name = f"{task}-{rollout}"
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise BadTaskRow(
            f"_ng_rollout_id is {name!r}: letters, digits, dots, dashes and underscores, a letter or digit first."
        )
    attempt = row.get("_ng_attempt_index") or 0
    if not isinstance(attempt, int):
        raise BadTaskRow(f"_ng_attempt_index is {attempt!r}; it must be a whole number.")
    return f"{name}-a{attempt}" if attempt > 0 else name


METRICS = {
    "roundhouse_gym_request_seconds": "Requests of an environment's server, by route (verify, …; tool) and status.",
    "roundhouse_gym_requests_in_flight": "Requests that are being answered.",
}
ROUTES = ("seed_session", "verify", "close", "aggregate_metrics", "reset", "step", "mcp")
SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60)


class MeasuredRequests:
    """ASGI middleware that measures requests."""

    def __init__(self, app: Any, registry: CollectorRegistry) -> None:
        self._app = app
        seconds, in_flight = METRICS.items()
        self._seconds = Histogram(*seconds, ["route", "status"], buckets=SECONDS, registry=registry)
        self._in_flight = Gauge(*in_flight, registry=registry)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()

        async def counted(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._in_flight.inc()
        try:
            await self._app(scope, receive, counted)
        finally:
            self._in_flight.dec()
            last = scope["path"].rstrip("/").rsplit("/", 1)[-1]
            route = last if last in ROUTES else "tool" if scope["method"] == "POST" else "other"
            self._seconds.labels(route, status).observe(time.perf_counter() - began)
