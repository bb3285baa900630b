"""Any `Environment` over HTTP, by the contract of NeMo Gym's resources servers.

Invariants: every answer, whatever its status, sends the session cookie again (NeMo's agents keep only the newest answer's
cookies); a handler that raises answers 500 with the exception as a JSON string, and 503 with `X-Roundhouse-Failure: infra`
where the environment says that its infrastructure failed; sessions are bounded in number and in age, and so is the time of
a request, since nobody else ends a tool that hangs after its caller has left.

    GET  /                  {"status":"ok"}
    POST /seed_session      task row                       -> {}
    POST /<tool>            arguments                      -> what the tool returns
    POST /verify            row fields + response          -> the same + reward, reward_components, metrics, mask_sample
    POST /aggregate_metrics {"verify_responses": […]}      -> statistics

    python -m roundhouse.gym.resources_server --environment calculator --port 8001
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.middleware.sessions import SessionMiddleware

from roundhouse.errors import InfraError
from roundhouse.gym.aggregate import aggregate_metrics
from roundhouse.gym.environment import Environment, Verdict
from roundhouse.gym.failures import FAILURE_HEADER
from roundhouse.gym.middleware import RolloutPrefix, StickySession
from roundhouse.gym.session_store import SessionStore
from roundhouse.gym.tools import NOT_FOUND, Toolbox, ToolResult, bad_request, raised

log = logging.getLogger(__name__)

REQUEST_SECONDS = 600.0

Endpoint = Callable[[Request], Awaitable[Response]]


class RequestTimeout(InfraError):
    """The environment's code did not return."""


def build_app(
    environment: Environment,
    name: str | None = None,
    sessions: SessionStore | None = None,
    request_seconds: float = REQUEST_SECONDS,
) -> FastAPI:
    """The server of `environment`.

    Args:
        name: the instance's name; part of the cookie's name, which must differ between the servers of a rollout.
        request_seconds: time limit of the environment's code in one request.
    """
    server = _Server(environment, SessionStore() if sessions is None else sessions)
    app = FastAPI(title=environment.name)
    app.get("/")(server.alive)
    app.get("/reverify_mode")(server.reverify_mode)
    for path, endpoint in (
        ("/seed_session", server.seed_session),
        ("/verify", server.verify),
        ("/aggregate_metrics", server.aggregate),
        ("/{tool_name}", server.call_tool),
    ):
        app.post(path)(_guarded(endpoint, request_seconds))
    cookie = f"{type(environment).__name__}___{name or environment.name}"
    app.add_middleware(StickySession)
    app.add_middleware(SessionMiddleware, secret_key=cookie, session_cookie=cookie)
    app.add_middleware(RolloutPrefix)
    return app


class _BadBody(Exception):
    """The request's body is not what the route takes."""

    def __init__(self, answer: ToolResult) -> None:
        self.answer = answer


class _Server:
    """The routes."""

    def __init__(self, environment: Environment, sessions: SessionStore) -> None:
        self._environment = environment
        self._toolbox = Toolbox(environment)
        self._sessions = sessions
        self._stateless = type(environment).seed_session is Environment.seed_session

    async def alive(self) -> dict[str, str]:
        return {"status": "ok"}

    async def reverify_mode(self) -> str:
        return "stateless" if self._stateless else "unsupported"

    async def seed_session(self, request: Request) -> Response:
        row = await _object(request)
        self._sessions.reserve()
        state = await self._environment.seed_session(row)
        self._sessions.put(request.session["session_id"], state)
        return _json({})

    async def call_tool(self, request: Request) -> Response:
        name = request.path_params["tool_name"]
        if name not in self._toolbox:
            return _answer(NOT_FOUND)
        arguments = await _body(request)
        return _answer(await self._toolbox.call(self._state(request), name, arguments))

    async def verify(self, request: Request) -> Response:
        body = await _object(request, "responses_create_params", "response")
        response = body.pop("response")
        verdict = await self._environment.verify(self._state(request), body, response)
        self._sessions.verified(request.session["session_id"])
        return _json({**body, "response": response, **_fields(verdict)})

    async def aggregate(self, request: Request) -> Response:
        body = await _object(request, "verify_responses")
        return _json(aggregate_metrics(body["verify_responses"]))

    def _state(self, request: Request) -> Any:
        if self._stateless:  # nothing can be lost, so nothing needs to have been seeded
            return None
        return self._sessions.get(request.session["session_id"]).state


def _fields(verdict: Verdict) -> dict[str, Any]:
    fields: dict[str, Any] = {"reward": verdict.reward}
    if verdict.reward_components:
        fields["reward_components"] = verdict.reward_components
    if verdict.metrics:
        fields["metrics"] = verdict.metrics
    if verdict.mask:
        fields["mask_sample"] = True
    return fields


def _guarded(endpoint: Endpoint, seconds: float) -> Endpoint:
    """The endpoint, its exceptions turned into the contract's answers."""

    async def within_limit(request: Request) -> Response:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await endpoint(request)
        except TimeoutError as error:
            if limit.expired():
                raise RequestTimeout(f"{request.url.path} did not return within {seconds:g} s.") from error
            raise

    async def answer(request: Request) -> Response:
        try:
            return await within_limit(request)
        except _BadBody as error:
            return _answer(error.answer)
        except InfraError as error:
            result = raised(error)
            return Response(result.text, 503, {FAILURE_HEADER: "infra"}, "application/json")
        except Exception as error:  # the request's border: the contract answers with the exception's text
            log.exception("%s raised", request.url.path)
            return _answer(raised(error))

    return answer


async def _body(request: Request) -> Any:
    raw = await request.body()
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        detail = {"type": "json_invalid", "loc": [error.pos], "msg": "JSON decode error", "input": {}}
        raise _BadBody(bad_request([detail | {"ctx": {"error": error.msg}}])) from error


async def _object(request: Request, *required: str) -> dict[str, Any]:
    body = await _body(request)
    if not isinstance(body, dict):
        detail = {"type": "dict_type", "loc": [], "msg": "Input should be a valid dictionary", "input": body}
        raise _BadBody(bad_request([detail]))
    missing = [name for name in required if name not in body]
    if missing:
        details = [{"type": "missing", "loc": [name], "msg": "Field required", "input": body} for name in missing]
        raise _BadBody(bad_request(details))
    return body


def _answer(result: ToolResult) -> Response:
    return Response(result.text, result.status, media_type="application/json" if result.is_json else "text/plain")


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


if __name__ == "__main__":
    from roundhouse.gym.serve import main

    main()
