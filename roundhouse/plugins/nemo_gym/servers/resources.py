"""Any `Environment` over HTTP, by the contract of NeMo Gym's resources servers; Gymnasium environments by theirs.

Invariants: every answer, of any status, sends the session cookie again, because NeMo's agents keep only the newest
answer's cookies. Sessions are bounded in number and in age. Each is closed (`close_session`) once: by its client, after
a long idle time, after its verdict if room is needed, or at the end of the server. The close cancels a running tool.

    GET  /, /healthz, …     {"status":"ok"}
    POST /seed_session      task row                       -> {} or {"supports_explicit_close": true}
    POST /<tool>            arguments                      -> the tool's result
    POST /verify            row fields + response          -> the same + reward, reward_components, metrics, mask_sample
    POST /close             {}                             -> {}
    POST /close_session     resources_session_id, episode_id -> resources_session_id
    POST /aggregate_metrics {"verify_responses": […]}      -> statistics
    /mcp                    MCP, if it was requested: the tools again, for agents that use it (`roundhouse.plugins.mcp.client`)

    python -m roundhouse.plugins.nemo_gym.servers.resources --environment calculator --port 8001

The command either serves, or ends at once with one line that names the necessary change.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

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
    bad_request,
)
from roundhouse.errors import ConfigError, RoundhouseError
from roundhouse.http.asgi import serve
from roundhouse.http.sessions import Closing, SessionStore, outcome
from roundhouse.logs import set_up_observability
from roundhouse.plugins.nemo_gym.exchange.statistics import aggregate_metrics
from roundhouse.plugins.nemo_gym.servers.endpoints import (
    REQUEST_SECONDS,
    BadBody,
    add_liveness,
    answer,
    guarded,
    json_answer,
    json_body,
    object_body,
    with_sessions,
)
from roundhouse.rollout.protocol import SESSION_CLOSED, SESSION_HEADER, SESSION_LAST_USE, as_verdict, call_function

if TYPE_CHECKING:
    from roundhouse.plugins.nemo_gym.servers.mcp_endpoint import McpEndpoint


NAMED_SESSION, CLOSE_SESSION = "resources_session_id", "close_session"
MOST_CLOSED = 100_000
"""Number of closed sessions that refuse a late seed."""

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    environment: Environment | GymnasiumEnvironment,
    name: str | None = None,
    sessions: SessionStore | None = None,
    request_seconds: float = REQUEST_SECONDS,
    expose_tools_over_mcp: bool = False,
) -> FastAPI:
    """Return the server of `environment`.

    A client that needs its session no longer after the verdict announces that in the request to /verify
    (`X-Roundhouse-Session: last-use`); the answer then has `closed`, and a call to /close is unnecessary.

    An environment server of NeMo Gym (`single_agent_turn`) names its session itself: it seeds with
    `resources_session_id`, `episode_id`, `task_id` and `task_data`, and gets the id back. Seeding twice gives one
    session. Closing always succeeds, and a seed that arrives after it is refused, so that a late request creates no
    session that nothing closes.

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
                f"expose_tools_over_mcp is set, but {environment.name} speaks the Gymnasium protocol: its world answers tool "
                "calls itself. Remove it."
            )
        return build_gymnasium_app(environment, name, store, request_seconds)
    server = _ResourcesServer(environment, store)
    if expose_tools_over_mcp:
        from roundhouse.plugins.nemo_gym.servers.mcp_endpoint import McpEndpoint

        tools = [tool for tool in environment.tools().values() if tool.name not in RESERVED]
        server.mcp = McpEndpoint(name or environment.name, tools, server.run_tool, request_seconds)
    app = FastAPI(title=environment.name, lifespan=_lifespan(environment, store, server.mcp))
    add_liveness(app)
    app.get("/reverify_mode")(server.reverify_mode)
    routes = [
        ("/seed_session", server.seed_session),
        ("/verify", server.verify),
        ("/aggregate_metrics", server.aggregate),
    ]
    if not server.has_tool(CLOSE_SESSION):
        routes.append((f"/{CLOSE_SESSION}", server.close_named))
    if server.offers_close:
        routes.append(("/close", server.close))
    for path, endpoint in [*routes, ("/{tool_name}", server.call_tool)]:
        app.add_route(path, guarded(endpoint, request_seconds), methods=["POST"])
    if server.mcp is not None:
        server.mcp.mount(app)
    with_sessions(app, type(environment).__name__, name or environment.name)
    return app


def _lifespan(environment: Environment, store: SessionStore, mcp: McpEndpoint | None) -> Lifespan:
    """Close idle sessions while the server runs, and all sessions at its end."""
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
        self._compute_repeat_metrics = getattr(environment, "compute_repeat_metrics", None)  # a hook of NeMo Gym's
        self._sessions = sessions

    async def aggregate(self, request: Request) -> Response:
        body = await object_body(request, "verify_responses")
        return json_answer(
            aggregate_metrics(
                body["verify_responses"], self._compute_metrics, compute_repeat_metrics=self._compute_repeat_metrics
            )
        )


class _ResourcesServer(_Routes):
    """Routes of tools and a verifier."""

    def __init__(self, environment: Environment, sessions: SessionStore) -> None:
        super().__init__(environment, sessions)
        self._environment = environment
        self._toolbox = Toolbox(environment)
        self._stateless = type(environment).seed_session is Environment.seed_session
        self.offers_close = not self._stateless and "close" not in self._toolbox
        """A tool named close has the route."""
        self.mcp: McpEndpoint | None = None
        self._closed: OrderedDict[str, None] = OrderedDict()
        """The newest ids of named sessions that were closed."""

    def has_tool(self, name: str) -> bool:
        return name in self._toolbox

    async def reverify_mode(self) -> str:
        return "stateless" if self._stateless else "unsupported"

    async def seed_session(self, request: Request) -> Response:
        row = await object_body(request)
        if isinstance(row.get(NAMED_SESSION), str) and isinstance(row.get("episode_id"), dict):
            return await self._seed_named(request, row)
        session_id = request.session["session_id"]
        answer: dict[str, Any] = {} if self.mcp is None else {"mcp": self.mcp.offer(session_id)}
        if self._stateless:  # nothing to keep or to close
            return json_answer(answer)
        self._sessions.reserve()
        state = await self._environment.seed_session(row)
        self._sessions.put(session_id, state)
        return json_answer(answer | {"supports_explicit_close": True} if self.offers_close else answer)

    async def _seed_named(self, request: Request, body: dict[str, Any]) -> Response:
        """Begin the session that an environment server names, or join it; the cookie of the answer leads to it."""
        named, row = body[NAMED_SESSION], body.get("task_data")
        if named in self._closed:
            return answer(ToolResult(f"The session {named} was closed.", 409))
        if not isinstance(row, dict):
            detail = {"type": "dict_type", "loc": ["task_data"], "msg": "Input should be a valid dictionary"}
            raise BadBody(bad_request([detail | {"input": row}]))
        session_id = request.session["session_id"] = f"{NAMED_SESSION}:{named}"
        if not self._stateless and session_id not in self._sessions:
            self._sessions.reserve()
            self._sessions.put(session_id, await self._environment.seed_session(row))
        offer = {} if self.mcp is None else {"resources_tools": self.mcp.offer(session_id)}
        return json_answer({NAMED_SESSION: named, **offer})

    async def close_named(self, request: Request) -> Response:
        named = (await object_body(request, NAMED_SESSION))[NAMED_SESSION]
        self._sessions.close(f"{NAMED_SESSION}:{named}")
        if not self._stateless:
            self._closed[str(named)] = None
            if len(self._closed) > MOST_CLOSED:
                self._closed.popitem(last=False)
        return json_answer({NAMED_SESSION: named})

    async def call_tool(self, request: Request) -> Response:
        name = request.path_params["tool_name"]
        if name not in self._toolbox:
            return answer(NOT_FOUND)
        arguments = await json_body(request)
        return answer(await self.run_tool(request.session["session_id"], name, arguments))

    async def run_tool(self, session_id: str, name: str, arguments: Any) -> ToolResult:
        """Call a tool in a session; the call ends with the session.

        Raises:
            InfraError: the session is unknown, it ended, or the tool reports that its infrastructure failed.
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
        verdict = await call_function(self._environment.verify, state, body, judged)
        answer = json_answer({**body, "response": response, **verdict_fields(as_verdict(verdict))})
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
        prog="python -m roundhouse.plugins.nemo_gym.servers.resources", description=main.__doc__
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
        from roundhouse.plugins.nemo_gym.servers.endpoints import MeasuredRequests

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
    """Return the server of a Gymnasium environment; arguments as for `build_app`.

    A step with the same `_ng_step_request_id` as the one before it is played once, and both requests get the same
    answer, so that a client with a lost answer may ask again. A step ends with its session.

        POST /reset   task row                                  -> {"observation", "info": {supports_explicit_close, …}}
        POST /step    row + response [+ _ng_step_request_id]    -> {"observation", "reward", "terminated", "truncated", "info"}
        POST /close   {}                                        -> {}
        POST /aggregate_metrics
    """

    async def close(episode: Episode) -> None:
        await environment.close(episode.state)

    holds_something = type(environment).close is not GymnasiumEnvironment.close
    closing = Closing(sessions, close if holds_something else None)
    server = _GymnasiumServer(environment, sessions)
    app = FastAPI(title=environment.name, lifespan=closing.lifespan)
    add_liveness(app)
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
    """Routes of episodes."""

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
            # Shielded: the end of one caller must not cancel the step of another caller.
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
