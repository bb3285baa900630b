"""Any `GymnasiumEnvironment` over HTTP, by the contract of NeMo Gym's Gymnasium servers.

Invariants: those of the resources server; and a step under the same `_ng_step_request_id` as the one before it is played once,
both requests getting the same answer, so that a client which lost an answer may ask again. A step ends with its session.

    POST /reset   task row                                  -> {"observation", "info": {supports_explicit_close, …}}
    POST /step    row + response [+ _ng_step_request_id]    -> {"observation", "reward", "terminated", "truncated", "info"}
    POST /close   {}                                        -> {}
    POST /aggregate_metrics
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response

from roundhouse.compat.nemo_gym.servers.aggregate import aggregate_metrics
from roundhouse.compat.nemo_gym.servers.endpoints import guarded, json_answer, object_body, with_sessions
from roundhouse.environments.gymnasium import GymnasiumEnvironment, GymStep
from roundhouse.http.sessions import Closing, Seeded, SessionStore, outcome

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


class _GymnasiumServer:
    """The routes."""

    def __init__(self, environment: GymnasiumEnvironment, sessions: SessionStore) -> None:
        self._environment = environment
        self._sessions = sessions

    async def alive(self) -> dict[str, str]:
        return {"status": "ok"}

    async def reset(self, request: Request) -> Response:
        row = await object_body(request, "responses_create_params")
        self._sessions.reserve()
        state, observation = await self._environment.reset(row)
        self._sessions.put(request.session["session_id"], Episode(state))
        return json_answer({"observation": observation, "info": CAPABILITIES})

    async def step(self, request: Request) -> Response:
        body = await object_body(request, "responses_create_params", "response")
        session_id = request.session["session_id"]
        step = await self._played_once(
            self._sessions.get(session_id), body["response"], body.get("_ng_step_request_id")
        )
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

    async def _played_once(self, session: Seeded, response: dict[str, Any], request_id: str | None) -> GymStep:
        episode: Episode = session.state
        if request_id is None:
            return await outcome(session.begin(self._environment.step(episode.state, response)))
        if request_id != episode.request_id or episode.newest is None:
            episode.request_id = request_id
            episode.newest = session.begin(self._environment.step(episode.state, response))
        # Shielded: a caller that left must not take the step away from the one that asks again.
        return await outcome(asyncio.shield(episode.newest))

    async def close(self, request: Request) -> Response:
        await object_body(request)
        self._sessions.close(request.session["session_id"])
        return json_answer({})

    async def aggregate(self, request: Request) -> Response:
        body = await object_body(request, "verify_responses")
        return json_answer(aggregate_metrics(body["verify_responses"], self._environment.compute_metrics))
