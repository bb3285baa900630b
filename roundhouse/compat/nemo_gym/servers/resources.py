"""Any `Environment` over HTTP, by the contract of NeMo Gym's resources servers; Gymnasium environments by theirs.

Invariants: every answer, whatever its status, sends the session cookie again (NeMo's agents keep only the newest answer's
cookies); sessions are bounded in number and in age; each is given back (`close_session`) once: when its client closes it, when
it was unused for too long, when room is needed after its verdict, or when the server stops. A tool that still runs then is
cancelled.

    GET  /                  {"status":"ok"}
    POST /seed_session      task row                       -> {} or {"supports_explicit_close": true}
    POST /<tool>            arguments                      -> what the tool returns
    POST /verify            row fields + response          -> the same + reward, reward_components, metrics, mask_sample
    POST /close             {}                             -> {}
    POST /aggregate_metrics {"verify_responses": […]}      -> statistics
    /mcp                    MCP, where it was asked for: the tools again, for agents that speak it (`mcp_server`)

A client that will not use its session after the verdict says so in the request to /verify (`X-Roundhouse-Session: last-use`);
the answer then says `closed`, and no call to /close is needed.

    python -m roundhouse.compat.nemo_gym.servers.resources --environment calculator --port 8001

The command either serves, or ends at once with one line that says what to change.

Gymnasium environments: a step under the same `_ng_step_request_id` as the one before it is played once,
both requests getting the same answer, so that a client which lost an answer may ask again. A step ends with its session.

    POST /reset   task row                                  -> {"observation", "info": {supports_explicit_close, …}}
    POST /step    row + response [+ _ng_step_request_id]    -> {"observation", "reward", "terminated", "truncated", "info"}
    POST /close   {}                                        -> {}
    POST /aggregate_metrics
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

from roundhouse.compat.nemo_gym.exchange.statistics import aggregate_metrics
from roundhouse.compat.nemo_gym.servers.endpoints import (
    REQUEST_SECONDS,
    answer,
    guarded,
    json_answer,
    json_body,
    object_body,
    serve,
    with_sessions,
)
from roundhouse.environments import environment_config, load_to_serve
from roundhouse.environments.base import (
    NOT_FOUND,
    RESERVED,
    Environment,
    GymnasiumEnvironment,
    GymStep,
    Toolbox,
    ToolResult,
    Verdict,
)
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.http.sessions import Closing, SessionStore, outcome
from roundhouse.logs import set_up_observability
from roundhouse.rollout.protocol import SESSION_CLOSED, SESSION_HEADER, SESSION_LAST_USE

if TYPE_CHECKING:
    from roundhouse.compat.mcp import McpEndpoint


Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    environment: Environment | GymnasiumEnvironment,
    name: str | None = None,
    sessions: SessionStore | None = None,
    request_seconds: float = REQUEST_SECONDS,
    expose_tools_over_mcp: bool = False,
) -> FastAPI:
    """The server of `environment`.

    Args:
        name: the instance's name; part of the cookie's name, which must differ between the servers of a rollout.
        request_seconds: time limit of the environment's code in one request.
        expose_tools_over_mcp: serve /mcp as well, and hand out its token with each session.

    Raises:
        ConfigError: the tools of a Gymnasium environment cannot be served over MCP.
    """
    store = SessionStore() if sessions is None else sessions
    if isinstance(environment, GymnasiumEnvironment):
        if expose_tools_over_mcp:
            raise ConfigError(
                f"expose_tools_over_mcp is set, but {environment.name} speaks the Gymnasium protocol, whose world answers "
                "tool calls itself. Leave it out."
            )
        return build_gymnasium_app(environment, name, store, request_seconds)
    server = _ResourcesServer(environment, store)
    if expose_tools_over_mcp:
        from roundhouse.compat.mcp import McpEndpoint  # the SDK takes long to import, and most servers do without

        tools = [tool for tool in environment.tools().values() if tool.name not in RESERVED]
        server.mcp = McpEndpoint(name or environment.name, tools, server.run_tool, request_seconds)
    app = FastAPI(title=environment.name, lifespan=_lifespan(environment, store, server.mcp))
    app.get("/")(server.alive)
    app.get("/reverify_mode")(server.reverify_mode)
    routes = [
        ("/seed_session", server.seed_session),
        ("/verify", server.verify),
        ("/aggregate_metrics", server.aggregate),
    ]
    if server.offers_close:
        routes.append(("/close", server.close))
    for path, endpoint in [*routes, ("/{tool_name}", server.call_tool)]:
        app.add_route(path, guarded(endpoint, request_seconds), methods=["POST"])
    if server.mcp is not None:
        server.mcp.mount(app)
    with_sessions(app, type(environment).__name__, name or environment.name)
    return app


def _lifespan(environment: Environment, store: SessionStore, mcp: McpEndpoint | None) -> Lifespan:
    """The server's life: sessions are given back while it runs and at its end."""
    holds_something = type(environment).close_session is not Environment.close_session
    closing = Closing(store, environment.close_session if holds_something else None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with closing.lifespan(app):
            if mcp is None:
                yield
                return
            async with mcp.lifespan():
                yield

    return lifespan


class _Routes:
    """The routes of both protocols."""

    def __init__(self, environment: Environment | GymnasiumEnvironment, sessions: SessionStore) -> None:
        self._compute_metrics = environment.compute_metrics
        self._sessions = sessions

    async def alive(self) -> dict[str, str]:
        return {"status": "ok"}

    async def aggregate(self, request: Request) -> Response:
        body = await object_body(request, "verify_responses")
        return json_answer(aggregate_metrics(body["verify_responses"], self._compute_metrics))


class _ResourcesServer(_Routes):
    """Those of tools and a verifier."""

    def __init__(self, environment: Environment, sessions: SessionStore) -> None:
        super().__init__(environment, sessions)
        self._environment = environment
        self._toolbox = Toolbox(environment)
        self._stateless = type(environment).seed_session is Environment.seed_session
        self.offers_close = not self._stateless and "close" not in self._toolbox
        """A tool named close has the route."""
        self.mcp: McpEndpoint | None = None

    async def reverify_mode(self) -> str:
        return "stateless" if self._stateless else "unsupported"

    async def seed_session(self, request: Request) -> Response:
        row = await object_body(request)
        session_id = request.session["session_id"]
        answer: dict[str, Any] = {} if self.mcp is None else {"mcp": self.mcp.offer(session_id)}
        if self._stateless:  # nothing to keep, so nothing to give back
            return json_answer(answer)
        self._sessions.reserve()
        state = await self._environment.seed_session(row)
        self._sessions.put(session_id, state)
        return json_answer(answer | {"supports_explicit_close": True} if self.offers_close else answer)

    async def call_tool(self, request: Request) -> Response:
        name = request.path_params["tool_name"]
        if name not in self._toolbox:
            return answer(NOT_FOUND)
        arguments = await json_body(request)
        return answer(await self.run_tool(request.session["session_id"], name, arguments))

    async def run_tool(self, session_id: str, name: str, arguments: Any) -> ToolResult:
        """Call a tool in a session; the call ends with the session.

        Raises:
            InfraError: there is no such session, it ended, or the tool says that its infrastructure failed.
        """
        if self._stateless:
            return await self._toolbox.call(None, name, arguments)
        session = self._sessions.get(session_id)
        return await outcome(session.begin(self._toolbox.call(session.state, name, arguments)))

    async def verify(self, request: Request) -> Response:
        body = await object_body(request, "responses_create_params", "response")
        response = body.pop("response")
        judged = response if self.mcp is None else self.mcp.judged(response)
        # Without state nothing can be lost, so nothing needs to have been seeded
        state = None if self._stateless else self._sessions.get(request.session["session_id"]).state
        verdict = await self._environment.verify(state, body, judged)
        answer = json_answer({**body, "response": response, **verdict_fields(verdict)})
        if self.offers_close and request.headers.get(SESSION_HEADER) == SESSION_LAST_USE:
            self._sessions.close(request.session["session_id"])
            answer.headers[SESSION_HEADER] = SESSION_CLOSED
        else:
            self._sessions.finished(request.session["session_id"])
        return answer

    async def close(self, request: Request) -> Response:
        self._sessions.close(request.session["session_id"])
        return json_answer({})


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """A verdict in the form of an answer to /verify."""
    fields: dict[str, Any] = {"reward": verdict.reward}
    if verdict.reward_components:
        fields["reward_components"] = verdict.reward_components
    if verdict.metrics:
        fields["metrics"] = verdict.metrics
    if verdict.mask:
        fields["mask_sample"] = True
    return fields


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m roundhouse.compat.nemo_gym.servers.resources", description=main.__doc__
    )
    parser.add_argument("--environment", required=True, help="a built-in kind (docs/environments.md), or module:Class")
    parser.add_argument("--parameters", default="{}", help="the environment's parameters as a JSON object")
    parser.add_argument("--name", help="instance name (default: the environment's); part of the cookie's name")
    parser.add_argument("--mcp", action="store_true", help="serve the tools over MCP as well, at /mcp")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args(arguments)
    try:
        environment = load_to_serve(environment_config(options.environment, options.parameters))
        app = build_app(environment, options.name, expose_tools_over_mcp=options.mcp)
        registry = set_up_observability()
    except RoundhouseError as error:
        sys.exit(f"resources server: {error}")
    served: Any = app
    if registry is not None:
        from roundhouse.compat.nemo_gym.servers.endpoints import MeasuredRequests

        served = MeasuredRequests(app, registry)
    serve(served, options.host, options.port, log_level=options.log_level)


CAPABILITIES = {"supports_explicit_close": True, "supports_step_idempotency": True}


@dataclass(slots=True)
class Episode:
    """A session: the world's state, and the newest step by its request id."""

    state: Any
    request_id: str | None = None
    newest: asyncio.Task[GymStep] | None = None


def build_gymnasium_app(
    environment: GymnasiumEnvironment, name: str | None, sessions: SessionStore, request_seconds: float
) -> FastAPI:
    """The server of `environment`; arguments as for `resources_server.build_app`."""

    async def close(episode: Episode) -> None:
        await environment.close(episode.state)

    holds_something = type(environment).close is not GymnasiumEnvironment.close
    closing = Closing(sessions, close if holds_something else None)
    server = _GymnasiumServer(environment, sessions)
    app = FastAPI(title=environment.name, lifespan=closing.lifespan)
    app.get("/")(server.alive)
    for path, endpoint in (
        ("/reset", server.reset),
        ("/step", server.step),
        ("/close", server.close),
        ("/aggregate_metrics", server.aggregate),
    ):
        app.add_route(path, guarded(endpoint, request_seconds), methods=["POST"])
    with_sessions(app, type(environment).__name__, name or environment.name)
    return app


class _GymnasiumServer(_Routes):
    """Those of episodes."""

    def __init__(self, environment: GymnasiumEnvironment, sessions: SessionStore) -> None:
        super().__init__(environment, sessions)
        self._environment = environment

    async def reset(self, request: Request) -> Response:
        row = await object_body(request, "responses_create_params")
        self._sessions.reserve()
        state, observation = await self._environment.reset(row)
        self._sessions.put(request.session["session_id"], Episode(state))
        return json_answer({"observation": observation, "info": CAPABILITIES})

    async def step(self, request: Request) -> Response:
        body = await object_body(request, "responses_create_params", "response")
        session_id = request.session["session_id"]
        session = self._sessions.get(session_id)
        response = body["response"]
        request_id = body.get("_ng_step_request_id")
        episode: Episode = session.state
        if request_id is None:
            step = await outcome(session.begin(self._environment.step(episode.state, response)))
        else:
            if request_id != episode.request_id or episode.newest is None:
                episode.request_id = request_id
                episode.newest = session.begin(self._environment.step(episode.state, response))
            # Shielded: a caller that left must not take the step away from the one that asks again.
            step = await outcome(asyncio.shield(episode.newest))
        if step.done:
            self._sessions.finished(session_id)
        return json_answer(
            {
                "observation": step.observation,
                "reward": step.reward,
                "terminated": step.terminated,
                "truncated": step.truncated,
                "info": step.wire_info(),
            }
        )

    async def close(self, request: Request) -> Response:
        await object_body(request)
        self._sessions.close(request.session["session_id"])
        return json_answer({})


if __name__ == "__main__":
    main()
