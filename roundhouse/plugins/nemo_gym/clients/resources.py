"""An environment behind HTTP: any resources server of NeMo Gym's contract (/seed_session, /<tool>, /verify), or
Gymnasium server (/reset, /step, /close).

Invariant: rollouts share no cookies. A request that may have had an effect is never sent twice: a broken connection
fails the rollout's attempt, and the next attempt begins with a new session. A session is closed if its server offers
that: by `supports_explicit_close` in its answer to /seed_session, or by the configuration's `environment.close_route`.

Gymnasium: an episode's session is closed if the world offers that, even after a malformed answer to /reset. After a
lost answer, a step is sent again only if the world announced `supports_step_idempotency`, under the same
`_ng_step_request_id`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import orjson

from roundhouse.environments.base import NOT_FOUND, RESERVED, GymStep, Restoration, TaskRow, ToolResult, Verdict
from roundhouse.environments.task_files import read_split_rows
from roundhouse.errors import DataError, InfraError
from roundhouse.plugins.nemo_gym.clients.connection import BUSY, REQUEST_SECONDS, Connection, Cookies, json_object
from roundhouse.plugins.nemo_gym.section import RemoteEnvironment
from roundhouse.rollout.agents import GymnasiumLoop, ToolLoop
from roundhouse.rollout.clients import with_mcp
from roundhouse.rollout.protocol import (
    FAILURE_HEADER,
    SESSION_CLOSED,
    SESSION_HEADER,
    SESSION_LAST_USE,
    ClientWithRows,
    EnvironmentSession,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
    EpisodeSession,
    JudgeFailed,
    SeedFailed,
    StepFailed,
    ToolEnvironment,
    VerifierFailed,
)

log = logging.getLogger(__name__)

_TOOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class RemoteClient(ClientWithRows):
    """The common part of all servers' clients: a connection, a name, task rows."""

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        train: Sequence[TaskRow] = (),
        heldout: Sequence[TaskRow] = (),
        request_seconds: float = REQUEST_SECONDS,
        close_route: str | None = None,
        session_mcp: bool = True,
        restoration: Restoration = "none",
        limit: int = 0,
    ) -> None:
        super().__init__(train, heldout)
        self.connection = Connection(url, request_seconds, limit=limit)
        self.name = name or self.connection.authority
        self.close_route = None if close_route is None else close_route.strip("/")
        self.session_mcp = session_mcp
        self.restoration = restoration

    @classmethod
    def from_config(cls, config: RemoteEnvironment) -> Self:
        """The client of a configuration, its task rows read from their files."""
        train, heldout = read_split_rows(config)
        return cls(
            config.url,
            train=train,
            heldout=heldout,
            close_route=config.close_route,
            session_mcp=config.session_mcp,
            restoration=config.restore,
        )

    @property
    def url(self) -> str:
        return self.connection.url

    async def close(self) -> None:
        await self.connection.close()


class RemoteEnvironmentClient(RemoteClient):
    """Rollouts against a resources server."""

    @property
    def agent(self) -> ToolLoop:
        return ToolLoop()

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        session = _RemoteSession(self.connection, row, self.close_route)
        offer = await session.seed()
        if offer is None or not self.session_mcp:
            return session
        from roundhouse.plugins.mcp.client import (
            with_offered,  # the SDK takes long to import, and most servers offer nothing
        )

        try:
            return await with_offered(session, row, self.url, offer)
        except BaseException:
            await session.give_up()  # it is not handed to the caller
            raise

    def join_session(self, row: TaskRow, cookies: Cookies) -> EnvironmentSession:
        """A session that another client began, by its `cookies`; these are brought up to date in place."""
        return _RemoteSession(self.connection, row, self.close_route, cookies)


class RemoteSession:
    """Cookies of one rollout, and how its session is closed."""

    def __init__(
        self, connection: Connection, row: TaskRow, close_route: str | None, cookies: Cookies | None = None
    ) -> None:
        self._connection = connection
        self._row = row
        self._cookies: Cookies = {} if cookies is None else cookies
        self._close_route = close_route
        self.needs_close = False

    async def begin(self, route: str) -> str:
        """POST the row; the answer's text. From here on the session exists.

        Raises:
            InfraError, SeedFailed
        """
        text, _ = await self.ask(route, self._row, SeedFailed)
        self.needs_close = self._close_route is not None
        return text

    async def ask(
        self, route: str, body: Any, failure: type[Exception], headers: dict[str, str] | None = None
    ) -> tuple[str, Mapping[str, str]]:
        """POST JSON; return the text and the headers of a successful answer.

        Raises:
            InfraError, failure: as `refuse`.
        """
        status, text, received = await self._connection.exchange(
            "POST", route, orjson.dumps(body), self._cookies, headers=headers
        )
        refuse(status, text, f"{self._connection.url}/{route}", failure, received)
        return text, received

    async def give_up(self) -> None:
        """Close, if that is offered; a failure is logged."""
        if self.needs_close:
            try:
                await self.close()
            except (InfraError, DataError) as error:
                log.warning("%s/close failed: %s", self._connection.url, error)

    async def close(self) -> None:
        await self.ask(self._close_route or "close", {}, SeedFailed)


class _RemoteSession(RemoteSession):
    ordered = False
    """Whether the order of calls matters. Only the server's owner knows this and sets `rollout.parallel_tool_calls`."""
    tools: Sequence[dict[str, Any]] = ()
    answer: dict[str, Any] | None = None

    async def seed(self) -> Any:
        """Begin a session; return the server's MCP endpoint, or None."""
        text = await self.begin("seed_session")
        if len(text) <= 2:  # most servers answer {}
            return None
        reply = lenient_object(text)
        self.needs_close = self.needs_close or offers_close(reply)
        return reply.get("mcp")

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        # The name is the policy's invention: it must not reach another route, nor another path.
        if name in RESERVED or not _TOOL_NAME.fullmatch(name):
            return NOT_FOUND
        if self.needs_close and name == (self._close_route or "close"):
            return NOT_FOUND
        status, text = await self._connection.post(name, arguments, self._cookies)
        return ToolResult(text, status)

    async def follow_up(self, response: dict[str, Any]) -> str | None:
        return None

    async def verify(self, response: dict[str, Any]) -> Verdict:
        # A server that knows the header closes the session with its verdict, which saves a request.
        last_use = {SESSION_HEADER: SESSION_LAST_USE} if self.needs_close else None
        text, headers = await self.ask("verify", {**self._row, "response": response}, VerifierFailed, last_use)
        if headers.get(SESSION_HEADER) == SESSION_CLOSED:
            self.needs_close = False
        where = f"{self._connection.url}/verify"
        reply = json_object(text, where, VerifierFailed)
        if "reward" not in reply:
            raise VerifierFailed(f"{where} answered without a reward: {text}")
        self.answer = reply
        return verdict_from_reply(reply, self._row)


def refuse(status: int, text: str, where: str, failure: type[Exception], headers: Mapping[str, str]) -> None:
    """Raise the error for an answer's status; return for a status below 300.

    Raises:
        EnvironmentUnavailable: the server fails at present: 429 or a 5xx. Our own servers mark a 500 by the environment's
            code as the row's fault, which raises `failure` instead.
        failure: any other status of 300 and more.
    """
    if (status >= 500 or status in BUSY) and headers.get(FAILURE_HEADER) != "data":
        raise EnvironmentUnavailable(f"{where} answered {status}: {text}")
    if status >= 300:
        raise failure(f"{where} answered {status}: {text}")


def lenient_object(text: str) -> dict[str, Any]:
    """Return the JSON object in `text`, or an empty one if the text is anything else."""
    try:
        reply = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return reply if isinstance(reply, dict) else {}


def offers_close(reply: Mapping[str, Any]) -> bool:
    """Return whether the answer that began a session offers POST /close."""
    info = reply.get("info")
    offered = info.get("supports_explicit_close") if isinstance(info, dict) else None
    return reply.get("supports_explicit_close") is True or offered is True


def refuse_failure_mark(reply: dict[str, Any]) -> None:
    """Raise an error if an answer of status 200 carries a failure mark: its reward of 0 is then not a reward.

    Raises:
        VerifierFailed: the mark is terminal.
        JudgeFailed: another attempt may succeed.
    """
    failure = reply.get("_ng_failure_class")
    if failure is not None:
        kind = VerifierFailed if reply.get("_ng_failure_terminal") else JudgeFailed
        raise kind(f"The verifier reports {failure}: {reply.get('_ng_failure_judge_error', 'no detail given')}")


def verdict_from_reply(reply: dict[str, Any], row: TaskRow) -> Verdict:
    """Return the verdict in a /verify answer. Numbers that the row lacks are the environment's metrics.

    Raises:
        JudgeFailed, VerifierFailed: the answer carries a failure mark.
    """
    refuse_failure_mark(reply)
    extras = {
        name: value
        for name, value in reply.items()
        if isinstance(value, int | float)
        and name not in row
        and name not in ("reward", "mask_sample")
        and not name.startswith("_ng_")
    }
    metrics, components = reply.get("metrics"), reply.get("reward_components")
    return Verdict(
        reward=reply["reward"],
        reward_components=components if isinstance(components, dict) else {},
        metrics=extras | (metrics if isinstance(metrics, dict) else {}),
        mask=reply.get("mask_sample", False),
    )


STEP_ATTEMPTS = 3
STEP_RETRY_SECONDS = 0.5


class RemoteEpisodeClient(RemoteClient):
    """Episodes on a Gymnasium server of NeMo Gym's contract."""

    @property
    def agent(self) -> GymnasiumLoop:
        return GymnasiumLoop()

    async def reset(self, row: TaskRow) -> tuple[EpisodeSession, str | None]:
        session = _RemoteEpisode(self.connection, row, self.close_route)
        return session, await session.reset()


class _RemoteEpisode(RemoteSession):
    def __init__(self, connection: Connection, row: TaskRow, close_route: str | None) -> None:
        super().__init__(connection, row, close_route)
        self._idempotent = False

    async def reset(self) -> str | None:
        text = await self.begin("reset")
        self.needs_close = self.needs_close or offers_close(lenient_object(text))
        try:
            reply = _object(text, f"{self._connection.url}/reset")
        except StepFailed:
            await self.give_up()
            raise
        self._idempotent = reply["info"].get("supports_step_idempotency") is True
        observation: str | None = reply["observation"]
        return observation

    async def step(self, response: dict[str, Any]) -> GymStep:
        body = {**self._row, "response": response}
        if self._idempotent:
            body["_ng_step_request_id"] = uuid.uuid4().hex
        where = f"{self._connection.url}/step"
        text = await self._send(body)
        reply = _object(text, where)
        refuse_failure_mark(reply)
        if "reward" not in reply:
            raise StepFailed(f"{where} answered without a reward: {text}")
        info = reply["info"]
        try:
            tool_outputs = {
                str(entry["call_id"]): entry["output"]
                if isinstance(entry["output"], str)
                else orjson.dumps(entry["output"]).decode()
                for entry in info.get("tool_outputs") or []
            }
        except (TypeError, KeyError) as error:
            raise StepFailed(
                f"{where}: info.tool_outputs must be a list of call_id and output ({error!r}): {info}"
            ) from error
        return GymStep(
            observation=reply["observation"],
            reward=reply["reward"],
            terminated=reply.get("terminated") is True,
            truncated=reply.get("truncated") is True,
            tool_outputs=tool_outputs,
            metrics={name: value for name, value in info.items() if isinstance(value, int | float)},
            info=info,
        )

    async def _send(self, body: dict[str, Any]) -> str:
        attempts = STEP_ATTEMPTS if self._idempotent else 1
        for attempt in range(1, attempts + 1):
            try:
                return (await self.ask("step", body, StepFailed))[0]
            except (EnvironmentUnreachable, EnvironmentTimeout):
                if attempt == attempts:
                    raise
                await asyncio.sleep(STEP_RETRY_SECONDS)
        raise AssertionError("the loop returns or raises")


def _object(text: str, where: str) -> dict[str, Any]:
    """Return a Gymnasium answer with `observation` and `info` in their types.

    Raises:
        StepFailed: the types differ.
    """
    reply = json_object(text, where, StepFailed)
    reply = {"observation": None, **reply, "info": reply.get("info") or {}}
    if not isinstance(reply["info"], dict) or not isinstance(reply["observation"], str | None):
        raise StepFailed(f"{where}: observation must be a text or null, and info an object: {text}")
    return reply


def open_remote(config: RemoteEnvironment) -> ToolEnvironment | RemoteEpisodeClient:
    """Return the client of a resources server.

    Raises:
        ConfigError: its URL or task files are wrong.
    """
    if config.protocol == "gymnasium":
        return RemoteEpisodeClient.from_config(config)
    return with_mcp(RemoteEnvironmentClient.from_config(config), config.mcp_servers)
