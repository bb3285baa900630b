"""JSON over HTTP to one server of NeMo Gym's contract.

Invariant: a call ends within its time limit, with a status and a body or with a typed infrastructure failure; it is sent once,
since a request whose answer was lost may have had its effect. Cookies are the caller's: merged from every answer, sent back as
they came, read by nobody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import orjson
from yarl import URL

from roundhouse.errors import ConfigError
from roundhouse.http.sockets import PacedConnector, allow_open_files
from roundhouse.rollout.failures import (
    FAILURE_HEADER,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
)

CONNECT_SECONDS = 60.0
"""Generous: where thousands of rollouts wake up together on a busy machine, a connection that stands is noticed late."""
REQUEST_SECONDS = 600.0
"""Guard of last resort for one request; the limits of a rollout and of its tool calls are tighter."""
KEEP_ALIVE_SECONDS = 2.0
"""Well below uvicorn's 5 s, so that no connection is reused in the moment in which its server closes it, not even where both
are busy and late; such a request could not be sent again."""
MOST_QUOTED = 500
"""Characters of an answer that an error's text repeats."""
BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of a proxy before it, that cannot serve at present."""

Cookies = dict[str, str]


class Connection:
    """Connections to the server at `url`. Close it in the event loop that used it."""

    def __init__(self, url: str, request_seconds: float = REQUEST_SECONDS, *, key: str = "environment.url") -> None:
        """`key` is the configuration key that holds the URL.

        Raises:
            ConfigError: it is no URL.
        """
        if not re.match(r"https?://[^/]+", url):
            raise ConfigError(f"{key} is {url!r}: give the server's base URL, such as http://127.0.0.1:8001.")
        self.url = url.rstrip("/")
        self.request_seconds = request_seconds
        self._key = key
        self._http: aiohttp.ClientSession | None = None

    @property
    def authority(self) -> str:
        """Host and port."""
        return URL(self.url).authority

    async def post(
        self, path: str, body: Any, cookies: Cookies | None = None, *, seconds: float | None = None
    ) -> tuple[int, str]:
        """POST JSON; status and body text of the answer, whatever the status. `cookies` is brought up to date.

        Raises:
            EnvironmentUnreachable, EnvironmentTimeout, EnvironmentUnavailable
        """
        status, text, _ = await self.exchange("POST", path, orjson.dumps(body), cookies, seconds=seconds)
        return status, text

    async def get(self, path: str, *, seconds: float | None = None) -> tuple[int, str]:
        """GET; as `post`."""
        status, text, _ = await self.exchange("GET", path, None, None, seconds=seconds)
        return status, text

    async def exchange(
        self,
        method: str,
        path: str,
        data: bytes | None,
        cookies: Cookies | None,
        *,
        headers: dict[str, str] | None = None,
        seconds: float | None = None,
    ) -> tuple[int, str, Mapping[str, str]]:
        """One request; status, body text and headers of its answer."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        if cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        target = URL(f"{self.url}/{path}", encoded=True)
        limit = aiohttp.ClientTimeout(total=seconds or self.request_seconds, sock_connect=CONNECT_SECONDS)
        try:
            request = self._session().request(
                method, target, data=data, headers=sent, allow_redirects=False, timeout=limit
            )
            async with request as reply:
                text = (await reply.read()).decode("utf-8", "replace")
        except TimeoutError as error:
            raise EnvironmentTimeout(f"No answer from {target} within {limit.total:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentUnreachable(
                f"{target}: {error or type(error).__name__}. Is the server running, and {self._key} right?"
            ) from error
        if cookies is not None:
            cookies.update((name, morsel.coded_value) for name, morsel in reply.cookies.items())
        if reply.headers.get(FAILURE_HEADER) == "infra":
            raise EnvironmentUnavailable(f"{target} answered {reply.status}: {text}")
        return reply.status, text, reply.headers

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            allow_open_files()
            connector = PacedConnector(keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._http = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._http

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


def json_object(text: str, where: str, failure: Callable[[str], Exception]) -> dict[str, Any]:
    """The JSON object that an answer's `text` holds. `where` is who answered.

    Raises:
        failure: it holds none.
    """
    try:
        reply = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise failure(f"{where} answered no JSON: {error}: {text[:MOST_QUOTED]}") from error
    if not isinstance(reply, dict):
        raise failure(f"{where} answered no JSON object: {text[:MOST_QUOTED]}")
    return reply
