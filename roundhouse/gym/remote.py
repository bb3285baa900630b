"""An environment behind HTTP: any resources server of NeMo Gym's contract (/seed_session, /<tool>, /verify).

Invariant: a rollout's cookies are its own, merged from every response and sent back as they came; nothing reads them. A
request that may have had an effect is never sent twice: a broken connection fails the rollout's attempt, and the next attempt
begins with a new session.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from roundhouse.config.models import RemoteEnvironment
from roundhouse.errors import ConfigError
from roundhouse.gym.environment import Split, TaskRow, Verdict
from roundhouse.gym.failures import (
    FAILURE_HEADER,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
    JudgeFailed,
    SeedFailed,
    VerifierFailed,
)
from roundhouse.gym.sessions import EnvironmentSession
from roundhouse.gym.task_files import read_task_rows
from roundhouse.gym.tools import NOT_FOUND, RESERVED, ToolResult

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 600.0
"""Guard of last resort for one request; the limits of a rollout and of its tool calls are tighter."""
KEEP_ALIVE_SECONDS = 4.0
"""Below uvicorn's 5 s, so that a connection is not reused in the moment in which its server closes it."""

_TOOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_BUSY = frozenset({429, 502, 503, 504})


class RemoteEnvironmentClient:
    """Rollouts against a resources server."""

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        train: Sequence[TaskRow] = (),
        heldout: Sequence[TaskRow] = (),
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        if not re.match(r"https?://[^/]+", url):
            raise ConfigError(f"environment.url is {url!r}: give the server's base URL, such as http://127.0.0.1:8001.")
        self.url = url.rstrip("/")
        self.name = name or URL(self.url).authority
        self._tasks: dict[Split, Sequence[TaskRow]] = {"train": train, "heldout": heldout}
        self._limits = aiohttp.ClientTimeout(total=request_seconds, sock_connect=CONNECT_SECONDS)
        self._http: aiohttp.ClientSession | None = None

    @classmethod
    def from_config(cls, config: RemoteEnvironment) -> RemoteEnvironmentClient:
        """The client of a configuration, its task rows read from their files."""
        heldout = read_task_rows(config.heldout_tasks, "environment.heldout_tasks") if config.heldout_tasks else []
        return cls(config.url, train=read_task_rows(config.train_tasks, "environment.train_tasks"), heldout=heldout)

    def tasks(self, split: Split) -> Sequence[TaskRow]:
        return self._tasks[split]

    async def seed_session(self, row: TaskRow) -> EnvironmentSession:
        session = _RemoteSession(self, row)
        await session.seed()
        return session

    async def post(self, path: str, body: Any, cookies: dict[str, str]) -> tuple[int, str]:
        """POST JSON; status and body text of the answer, whatever the status. `cookies` is brought up to date.

        Raises:
            EnvironmentUnreachable, EnvironmentTimeout, EnvironmentUnavailable
        """
        headers = {"Content-Type": "application/json"}
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        target = URL(f"{self.url}/{path}", encoded=True)
        try:
            request = self._session().post(target, data=orjson.dumps(body), headers=headers, allow_redirects=False)
            async with request as reply:
                text = (await reply.read()).decode("utf-8", "replace")
        except TimeoutError as error:
            raise EnvironmentTimeout(f"No answer from {target} within {self._limits.total:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentUnreachable(
                f"{target}: {error or type(error).__name__}. Is the resources server running, and environment.url right?"
            ) from error
        cookies.update((name, morsel.coded_value) for name, morsel in reply.cookies.items())
        if reply.headers.get(FAILURE_HEADER) == "infra":
            raise EnvironmentUnavailable(f"{target} answered {reply.status}: {text}")
        return reply.status, text

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # The collector bounds the concurrency; a second bound here would be waiting without a name.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._http = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=self._limits
            )
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _RemoteSession:
    def __init__(self, client: RemoteEnvironmentClient, row: TaskRow) -> None:
        self._client = client
        self._row = row
        self._cookies: dict[str, str] = {}

    async def seed(self) -> None:
        status, text = await self._client.post("seed_session", self._row, self._cookies)
        if status in _BUSY:
            raise EnvironmentUnavailable(f"{self._client.url}/seed_session answered {status}: {text}")
        if status >= 300:
            raise SeedFailed(f"{self._client.url}/seed_session answered {status}: {text}")

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        # The name is the policy's invention: it must not reach another route, nor another path.
        if name in RESERVED or not _TOOL_NAME.fullmatch(name):
            return NOT_FOUND
        status, text = await self._client.post(name, arguments, self._cookies)
        return ToolResult(text, status)

    async def verify(self, response: dict[str, Any]) -> Verdict:
        status, text = await self._client.post("verify", {**self._row, "response": response}, self._cookies)
        where = f"{self._client.url}/verify"
        if status in _BUSY:
            raise EnvironmentUnavailable(f"{where} answered {status}: {text}")
        if status >= 300:
            raise VerifierFailed(f"{where} answered {status}: {text}")
        try:
            reply = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise VerifierFailed(f"{where} answered no JSON: {error}: {text}") from error
        if not isinstance(reply, dict) or "reward" not in reply:
            raise VerifierFailed(f"{where} answered without a reward: {text}")
        return verdict_from_reply(reply, self._row)


def verdict_from_reply(reply: dict[str, Any], row: TaskRow) -> Verdict:
    """The verdict in a /verify answer. Numbers that the row did not hold are the environment's metrics.

    Raises:
        JudgeFailed, VerifierFailed: the answer carries a failure mark; its reward of 0 is none.
    """
    failure = reply.get("_ng_failure_class")
    if failure is not None:
        kind = VerifierFailed if reply.get("_ng_failure_terminal") else JudgeFailed
        raise kind(f"The verifier reports {failure}: {reply.get('_ng_failure_judge_error', 'no detail given')}")
    extras = {
        name: value
        for name, value in reply.items()
        if isinstance(value, int | float) and name not in row and name not in ("reward", "mask_sample")
    }
    metrics, components = reply.get("metrics"), reply.get("reward_components")
    return Verdict(
        reward=reply["reward"],
        reward_components=components if isinstance(components, dict) else {},
        metrics=extras | (metrics if isinstance(metrics, dict) else {}),
        mask=bool(reply.get("mask_sample")),
    )
