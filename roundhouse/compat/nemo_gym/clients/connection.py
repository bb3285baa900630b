"""JSON over HTTP to one server of NeMo Gym's contract.

Invariant: a call ends within its time limit, with a status and a body or with a typed infrastructure failure; it is sent once,
since a request whose answer was lost may have had its effect. Cookies are the caller's: merged from every answer, sent back as
they came, unread.

Where a server is, by its instance name, as the head server reports it.

Invariant: only the entry's host and port are resolved; nothing else of the configuration, which may hold secrets, is read.

    {"my_agent": {"responses_api_agents": {"simple_agent": {"host": "127.0.0.1", "port": 10007, …}}}}
    server_url(that, "my_agent", head) == "http://127.0.0.1:10007"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yarl import URL

from roundhouse.config.yaml_text import load_yaml
from roundhouse.errors import ConfigError
from roundhouse.generation.client import PacedConnector, allow_open_files
from roundhouse.rollout.protocol import (
    FAILURE_HEADER,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
    UnknownAgent,
)

CONNECT_SECONDS = 60.0
"""Generous: where thousands of rollouts wake up together on a busy machine, an established connection is noticed late."""
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
            if self._http is None:
                allow_open_files()
                connector = PacedConnector(keepalive_timeout=KEEP_ALIVE_SECONDS)
                self._http = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
            request = self._http.request(method, target, data=data, headers=sent, allow_redirects=False, timeout=limit)
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

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None


def json_object(text: str, where: str, failure: Callable[[str], Exception]) -> dict[str, Any]:
    """The JSON object that an answer's `text` holds. `where` names the server.

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


PATH = "global_config_dict_yaml"
SECONDS = 30.0
AGENTS, RESOURCES = "responses_api_agents", "resources_servers"
_ANY_HOST = ("0.0.0.0", "::")


async def look_up(head: Connection, agent: str, token: str | None = None) -> str:
    """Base URL of an agent server.

    Raises:
        InfraError: the head server cannot be asked, or does not answer with a configuration.
        UnknownAgent: it knows no agent of this name.
    """
    return server_url(await _configuration(head, token), agent, head.url)


async def look_up_all(head: Connection, token: str | None = None) -> dict[str, str]:
    """Base URLs of all agent servers that have an address, by instance name.

    Raises:
        InfraError: as `look_up`.
    """
    tree = await _configuration(head, token)
    found = {}
    for name, _ in _servers(tree, AGENTS):
        with suppress(UnknownAgent):
            found[name] = server_url(tree, name, head.url)
    return found


async def look_up_verifiers(head: Connection, *, every: str, token: str | None = None) -> dict[str, str]:
    """Base URLs of the resources servers that judge, by the name of the agent; where the configuration has no agents, that of
    its one resources server under `every`.

    Raises:
        InfraError: as `look_up`.
        UnknownAgent: there are no agents and several resources servers.
    """
    tree = await _configuration(head, token)
    servers = dict(_servers(tree, RESOURCES))
    judges = {
        name: (tree[name][AGENTS][implementation].get("resources_server") or {}).get("name")
        for name, implementation in _servers(tree, AGENTS)
    }
    named = {agent: server for agent, server in judges.items() if server in servers}
    if not named and len(servers) > 1:
        raise UnknownAgent(f"{head.url} knows no agents, and several resources servers: {', '.join(sorted(servers))}.")
    named = named or dict.fromkeys([every], next(iter(servers), None))
    return {
        agent: _address(tree, server, RESOURCES, servers[server], head.url) for agent, server in named.items() if server
    }


def server_url(tree: Any, agent: str, head_url: str) -> str:
    """Base URL of `agent` in a head server's configuration.

    Raises:
        UnknownAgent: it is not there, or has no host and port.
    """
    known = dict(_servers(tree, AGENTS))
    if agent not in known:
        names = ", ".join(sorted(known)) or "none"
        raise UnknownAgent(f"environment.agent is {agent!r}, which {head_url} does not know. It knows: {names}.")
    return _address(tree, agent, AGENTS, known[agent], head_url)


def _address(tree: Any, name: str, kind: str, implementation: str, head_url: str) -> str:
    try:
        config = OmegaConf.create(tree)
        assert isinstance(config, DictConfig)
        entry = config[name][kind][implementation]
        host, port, url = entry.get("host"), entry.get("port"), entry.get("url")
    except OmegaConfBaseException as error:
        raise UnknownAgent(f"{head_url}: host and port of {name} cannot be resolved: {error}") from error
    if url and not entry.get("entrypoint"):
        return str(url).rstrip("/")
    if not host or not port:
        raise UnknownAgent(f"{head_url}: {name} has no host and port yet. Is it started?")
    if host in _ANY_HOST:
        host = URL(head_url).host
    return f"http://{host}:{port}"


async def _configuration(head: Connection, token: str | None) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    status, text, _ = await head.exchange("GET", PATH, None, None, headers=headers, seconds=SECONDS)
    if status != 200:
        raise EnvironmentUnavailable(f"{head.url}/{PATH} answered {status}: {text[:500]}")
    try:
        return load_yaml(orjson.loads(text))
    except (orjson.JSONDecodeError, yaml.YAMLError, AttributeError) as error:
        raise EnvironmentUnavailable(f"{head.url}/{PATH} answered no JSON string of YAML: {error}") from error


def _servers(tree: Any, kind: str) -> Iterator[tuple[str, str]]:
    """Instance name and implementation of each server of a kind."""
    if not isinstance(tree, Mapping):
        return
    for name, entry in tree.items():
        kinds = entry.get(kind) if isinstance(entry, Mapping) else None
        if isinstance(kinds, Mapping) and kinds:
            yield str(name), str(next(iter(kinds)))
