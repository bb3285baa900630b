"""The agent server: our agent loop under NeMo Gym's routes, against a resources server and a model server at URLs.

Invariants: /run answers 200 for every row, whatever happens to it (`run_answer`). A session that has begun is closed.
Every answer sends the session cookie again. Every call of this server has a time limit.

    GET  /, /health, /healthz, /livez, /readyz   {"status":"ok"}
    POST /run                    task row     -> the answer of /verify, its response with token fields
    POST /v1/responses           parameters   -> Responses object with the new items of all turns; tools are called in the
                                                 session of the request's cookies, and these cookies come back
    POST /aggregate_metrics      {"verify_responses": […]} -> the resources server's statistics of them
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from roundhouse.config.models import RolloutConfig, Sampling
from roundhouse.config.rollout import LARGEST_REWARD
from roundhouse.environments.base import Split, TaskRow, ToolResult, Verdict
from roundhouse.errors import DataError, InfraError
from roundhouse.plugins.nemo_gym.clients.model import UNLIMITED_TOKENS, ModelServerClient
from roundhouse.plugins.nemo_gym.clients.resources import RemoteEnvironmentClient, RemoteEpisodeClient
from roundhouse.plugins.nemo_gym.exchange.statistics import aggregate_metrics
from roundhouse.plugins.nemo_gym.server_sections import AgentServerConfig
from roundhouse.plugins.nemo_gym.servers.endpoints import (
    add_liveness,
    answer,
    guarded,
    json_answer,
    object_body,
    rollout_id,
    with_sessions,
)
from roundhouse.plugins.programs.model_server.rollout_paths import KEY, path_prefix
from roundhouse.rollout.agents import RolloutAttempt, ToolEpisode, ToolLoop, play_rollout
from roundhouse.rollout.plan import RolloutSpec
from roundhouse.rollout.protocol import (
    DETAIL,
    FAILURE,
    TERMINAL,
    BadTaskRow,
    ClosedOnExit,
    EnvironmentClient,
    EnvironmentSession,
    ToolEnvironment,
    classify,
)
from roundhouse.rollout.responses import response_object, whole_params, whole_response
from roundhouse.trajectories.records import FailureKind, Rollout, Status

CLASS_NAME = "RoundhouseAgent"
UNLIMITED_TURNS = 1_000_000
AGGREGATE_SECONDS = 300.0
MARGIN_SECONDS = 30.0
"""After the limit of a rollout, for closing its session and writing the answer."""


def build_app(
    config: AgentServerConfig,
    name: str,
    resources_url: str,
    model_url: str,
    *,
    names_calls: bool = False,
    captures: bool = False,
    limit: int = 0,
) -> FastAPI:
    """The agent server.

    Args:
        name: the instance's name; part of the cookie's name.
        names_calls: model calls go out under `ng-rollout/<id>`.
        captures: they ask to be recorded under it, with their tokens.
        limit: connections to each of the two servers; 0: one for each call.
    """
    server = _AgentServer(config, name, resources_url, model_url, names_calls or captures, captures, limit)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await server.close()

    app = FastAPI(title=name, lifespan=lifespan)
    add_liveness(app)
    seconds = config.timeout_seconds + MARGIN_SECONDS
    app.post("/run")(guarded(server.run, seconds))
    app.post("/v1/responses")(guarded(server.responses, seconds))
    app.post("/aggregate_metrics")(guarded(server.aggregate, AGGREGATE_SECONDS))
    with_sessions(app, CLASS_NAME, name)
    return app


class _AgentServer:
    """The routes."""

    def __init__(
        self,
        config: AgentServerConfig,
        name: str,
        resources_url: str,
        model_url: str,
        names_calls: bool,
        captures: bool,
        limit: int,
    ) -> None:
        self._config = config
        self._model = ModelServerClient(model_url, config.model_route, config.model_timeout_seconds, limit)
        client = RemoteEpisodeClient if config.protocol == "gymnasium" else RemoteEnvironmentClient
        self._environment = client(
            resources_url,
            name=config.resources_server.name,
            request_seconds=config.timeout_seconds,
            close_route=config.close_route,
            limit=limit,
        )
        self._cookie = f"{CLASS_NAME}___{name}"
        self._names_calls = names_calls
        self._captures = captures
        self._judges_overflow = config.first_turn_overflow == "judged"
        self._limits = RolloutConfig(
            max_turns=config.max_steps or UNLIMITED_TURNS,
            max_tokens=config.max_tokens or 2 * UNLIMITED_TOKENS,
            timeout_seconds=config.timeout_seconds,
            tool_timeout_seconds=config.tool_timeout_seconds,
            parallel_tool_calls=config.parallel_tool_calls,
            reward_limit=LARGEST_REWARD,
        )
        self._sampling = Sampling(max_new_tokens=UNLIMITED_TOKENS)

    async def run(self, request: Request) -> Response:
        row = without_results(await object_body(request))
        try:
            params = row.get("responses_create_params")
            if not isinstance(params, dict):
                raise BadTaskRow(f"responses_create_params is {params!r}; a task row needs an object there.")
            prefix = path_prefix(rollout_id(row) if self._names_calls else None, capture=self._captures)
            policy = self._model.rollout(params, prefix=prefix)
            environment: EnvironmentClient = self._environment
            if self._config.skip_verification and isinstance(self._environment, RemoteEnvironmentClient):
                environment = UnverifiedEnvironment(self._environment, self._config.skip_verification_reward)
            played = await play_rollout(
                _spec(row),
                policy,
                environment,
                self._limits,
                self._sampling,
                on_policy=False,
                judges_overflow=self._judges_overflow,
            )
        except DataError as error:  # the row is at fault before anything was begun
            kind, code, detail = classify(error)
            return json_answer(failed_row(row, code, detail, terminal=kind is FailureKind.DATA))
        return json_answer(run_answer(played))

    async def responses(self, request: Request) -> Response:
        params = await object_body(request, "input")
        if not isinstance(self._environment, RemoteEnvironmentClient):
            text = "A Gymnasium environment is played by /run only: its steps need the task row."
            return answer(ToolResult(orjson.dumps(text).decode(), 501))
        mark = request.scope[KEY]
        cookies = {key: value for key, value in request.cookies.items() if key != self._cookie}
        policy = self._model.rollout(
            params, prefix=path_prefix(mark.rollout, capture=mark.capture or (self._captures and bool(mark.rollout)))
        )
        row = {"responses_create_params": params}
        spec = _spec(row)
        attempt = RolloutAttempt(
            Rollout(
                group_id=spec.group_id,
                sample=spec.sample,
                task=row,
                environment="",
                status=Status.FAILED,
                seed=spec.seed,
                started_at=time.time(),
            ),
            policy,
            self._limits,
            self._sampling,
            on_policy=False,
            judges_overflow=self._judges_overflow,
        )
        session = self._environment.join_session(attempt.rollout.task, cookies)
        async with asyncio.timeout(self._config.timeout_seconds):
            episode = ToolEpisode(attempt)
            attempt.response = episode.response(await episode.converse(session))
        reply = json_answer(whole_response(attempt.response_with_tokens() or attempt.response))
        for key, value in {**cookies, **policy.cookies}.items():
            reply.headers.append("set-cookie", f"{key}={value}; path=/; HttpOnly; SameSite=lax")
        return reply

    async def aggregate(self, request: Request) -> Response:
        body = await object_body(request, "verify_responses")
        if self._config.skip_verification:
            return json_answer(aggregate_metrics(()))
        try:
            status, text = await self._environment.connection.post("aggregate_metrics", body, seconds=AGGREGATE_SECONDS)
        except InfraError:
            status, text = 503, ""
        if status == 200:
            return Response(text, media_type="application/json")
        return json_answer(aggregate_metrics(body["verify_responses"]))  # rollouts are kept; so are their statistics

    async def close(self) -> None:
        await self._model.close()
        await self._environment.close()


def _spec(row: dict[str, Any]) -> RolloutSpec:
    """The seed names items only: model servers draw for themselves."""
    group = next((str(row[name]) for name in ("_ng_task_index", "task_id") if row.get(name) is not None), "row")
    sample = row.get("_ng_rollout_index")
    return RolloutSpec(group, sample if isinstance(sample, int) else 0, row, random.getrandbits(32))


_RESULT_KEYS = frozenset({"reward", "response", "error", FAILURE, TERMINAL, DETAIL, "_ng_no_persist"})


def without_results(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row without marks of a failure and without a reward: only this server may set them."""
    return {key: value for key, value in row.items() if key not in _RESULT_KEYS}


def run_answer(played: RolloutAttempt) -> dict[str, Any]:
    """Return the answer of /run for a rollout, judged or failed.

    The answer for a judged rollout has the verifier's fields unchanged. Both answers have every field of parameters,
    response and items that NeMo Gym's rows have; an unset field is null.
    """
    rollout = played.rollout
    if rollout.status is Status.FAILED or played.answer is None:
        terminal = rollout.failure_kind is FailureKind.DATA
        return failed_row(rollout.task, rollout.failure_code, rollout.failure_detail, terminal=terminal)
    answer = {"responses_create_params": rollout.task["responses_create_params"], **played.answer}
    # The response as the verifier returned it, with the token fields that it was not shown
    judged, response = answer.get("response"), played.response_with_tokens()
    items = judged.get("output") if isinstance(judged, dict) else None
    if (
        response is not None
        and isinstance(judged, dict)
        and isinstance(items, list)
        and len(items) == len(response["output"])
    ):
        marked = list(items)
        for index, fields in played.token_marks:
            marked[index] = {**marked[index], **fields}
        response = {**judged, "output": marked}
    params = answer["responses_create_params"]
    return {
        **answer,
        "responses_create_params": whole_params(params) if isinstance(params, dict) else params,
        "response": None if response is None else whole_response(response),
    }


def failed_row(row: Mapping[str, Any], code: str, detail: str, *, terminal: bool) -> dict[str, Any]:
    """Return the row with the marks by which collectors file a failure. Its response is empty, because collectors read
    it.

        {…row, "response": {…}, "reward": 0.0, "_ng_failure_class": "engine_timeout", "_ng_failure_detail": "…"}

    `_ng_failure_terminal: true` is added if a retry cannot help. The wire format requires the reward of 0.0; no
    collector counts it: such rows go to its failures file.
    """
    nothing = {"type": "output_text", "text": "", "annotations": []}
    message = {"type": "message", "id": "msg_failed", "role": "assistant", "status": "completed", "content": [nothing]}
    response = response_object("resp_failed", [message], model="policy", created_at=time.time())
    params = row.get("responses_create_params")
    answered = {
        **row,
        **({"responses_create_params": whole_params(params)} if isinstance(params, dict) else {}),
        "response": whole_response(response),
        "reward": 0.0,
        FAILURE: code,
        DETAIL: detail,
    }
    return answered | {TERMINAL: True} if terminal else answered


class UnverifiedEnvironment(ClosedOnExit):
    """Environment with a fixed reward and without a verifier call (`skip_verification`).

    Tools and sessions are the environment's. The reward is the configured one, and the answer has
    `verification_skipped`, so that nobody takes it for a verdict.
    """

    def __init__(self, environment: ToolEnvironment, reward: float) -> None:
        self.name = environment.name
        self.restoration = environment.restoration
        self._environment = environment
        self._reward = reward

    @property
    def agent(self) -> ToolLoop:
        return ToolLoop()

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._environment.tasks(split)

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        return _UnverifiedSession(await self._environment.seed_session(row), row, self._reward)

    async def close(self) -> None:
        await self._environment.close()


class _UnverifiedSession:
    def __init__(self, session: EnvironmentSession, row: TaskRow, reward: float) -> None:
        self._session = session
        self._row = row
        self._reward = reward
        self.ordered = session.ordered
        self.tools = session.tools
        self.answer: dict[str, Any] | None = None

    @property
    def needs_close(self) -> bool:
        return self._session.needs_close

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        return await self._session.call_tool(name, arguments)

    async def follow_up(self, response: dict[str, Any]) -> str | None:
        return await self._session.follow_up(response)

    async def verify(self, response: dict[str, Any]) -> Verdict:
        self.answer = {**self._row, "response": response, "reward": self._reward, "verification_skipped": True}
        return Verdict(self._reward)

    async def close(self) -> None:
        await self._session.close()
