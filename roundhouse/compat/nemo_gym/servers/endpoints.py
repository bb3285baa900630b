"""What the routes of all our environment servers share: bodies in, answers out, and the border where exceptions end.

Invariant: a handler that raises answers 500 with the exception as a JSON string, and 503 with `X-Roundhouse-Failure: infra`
where it is an `InfraError`; the time of a request is bounded, since nobody else ends a tool that hangs after its caller left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from starlette.middleware.sessions import SessionMiddleware

from roundhouse.compat.nemo_gym.rollout_path import RolloutPath
from roundhouse.environments.tools import ToolResult, bad_request, raised
from roundhouse.errors import InfraError
from roundhouse.http.body_limit import BodyLimit
from roundhouse.http.sessions import StickySession
from roundhouse.rollout.failures import FAILURE_HEADER

log = logging.getLogger(__name__)

REQUEST_SECONDS = 600.0

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


class RequestTimeout(InfraError):
    """The environment's code did not return."""


class BadBody(Exception):
    """The request's body is not what the route takes."""

    def __init__(self, answer: ToolResult) -> None:
        self.answer = answer


async def within(seconds: float, work: Awaitable[T], path: str) -> T:
    """What `work` for `path` returns.

    Raises:
        RequestTimeout: it took longer.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise RequestTimeout(f"{path} did not return within {seconds:g} s.") from error
        raise


def guarded(endpoint: Endpoint, seconds: float) -> Endpoint:
    """The endpoint, its exceptions turned into the contract's answers."""

    async def answered(request: Request) -> Response:
        try:
            return await within(seconds, endpoint(request), request.url.path)
        except BadBody as error:
            return answer(error.answer)
        except InfraError as error:
            result = raised(error)
            return Response(result.text, 503, {FAILURE_HEADER: "infra"}, "application/json")
        except Exception as error:  # the request's border: the contract answers with the exception's text
            log.exception("%s raised", request.url.path)
            return answer(raised(error))

    return answered


def with_sessions(app: FastAPI, class_name: str, name: str) -> None:
    """Give every request of `app` a session, by a cookie `<class>___<instance name>` that every answer sends again."""
    cookie = f"{class_name}___{name}"
    app.add_middleware(StickySession)
    app.add_middleware(SessionMiddleware, secret_key=cookie, session_cookie=cookie)
    app.add_middleware(RolloutPath)
    app.add_middleware(BodyLimit)


async def json_body(request: Request) -> Any:
    """The body's JSON.

    Raises:
        BadBody: it is none.
    """
    raw = await request.body()
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": [error.pos], "msg": "JSON decode error", "input": {}}
        raise BadBody(bad_request([detail | {"ctx": {"error": error.msg}}])) from error


async def object_body(request: Request, *required: str) -> dict[str, Any]:
    """The body's JSON object, with the `required` fields in it.

    Raises:
        BadBody: it is none, or a field is missing.
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


def answer(result: ToolResult) -> Response:
    """A tool's result as an HTTP answer."""
    return Response(result.text, result.status, media_type="application/json" if result.is_json else "text/plain")


def json_answer(value: Any) -> Response:
    """200 with JSON."""
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
