"""JSON over HTTP to one server of NeMo Gym's contract.

Invariant: a call ends within its time limit, with a status and a body or with a typed infrastructure failure. It is
sent once, because a request with a lost answer may have had its effect. The caller keeps the cookies: merged from every
answer, sent back unread.

Address of a server, by its instance name, from the head server's report.

Invariant: only host, port and URL of the entry are read, and a reference in them (`${a.b}`) names another value of the
same configuration. The configuration comes from a stranger: no resolver runs on it, because `${oc.env:NAME}` would read
a variable of this process. The head server decides to which http(s) address rollouts are sent.

    {"my_agent": {"responses_api_agents": {"simple_agent": {"host": "127.0.0.1", "port": 10007, …}}}}
    server_url(that, "my_agent", head) == "http://127.0.0.1:10007"
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
import yaml
from yarl import URL

from roundhouse.config.yaml_text import load_yaml
from roundhouse.errors import ConfigError
from roundhouse.generation.client import PacedConnector, allow_open_files
from roundhouse.http.clients import client_session
from roundhouse.http.replies import read_reply
from roundhouse.plugins.nemo_gym.config.instances import RELAY
from roundhouse.rollout.protocol import (
    FAILURE_HEADER,
    EnvironmentTimeout,
    EnvironmentUnavailable,
    EnvironmentUnreachable,
    UnknownAgent,
)
from roundhouse.strict_json import read_json
from roundhouse.trajectories.storable import shown

CONNECT_SECONDS = 60.0
"""Long, because a busy machine with thousands of waking rollouts notices an established connection late."""
REQUEST_SECONDS = 600.0
"""Guard of last resort for one request; the limits of a rollout and of its tool calls are tighter."""
KEEP_ALIVE_SECONDS = 2.0
"""Well below uvicorn's 5 s, so that no connection is reused at the moment in which its server closes it, even if both
are busy and late; such a request could not be sent again."""
MOST_QUOTED = 500
"""Characters of an answer that an error's text repeats."""
BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server, or of a proxy before it, that cannot serve at present."""

Cookies = dict[str, str]


class Connection:
    """Connections to the server at `url`. Close it in the event loop that used it."""

    def __init__(
        self, url: str, request_seconds: float = REQUEST_SECONDS, *, key: str = "environment.url", limit: int = 0
    ) -> None:
        """Make a connection.

        Args:
            key: the configuration key that holds the URL.
            limit: connections at once; further requests wait. 0: one for each call.

        Raises:
            ConfigError: the URL is invalid.
        """
        if not re.match(r"https?://[^/]+", url):
            raise ConfigError(f"{key} is {url!r}: give the server's base URL, such as http://127.0.0.1:8001.")
        self.url = url.rstrip("/")
        self.request_seconds = request_seconds
        self._key = key
        self._limit = limit
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
                connector = PacedConnector(keepalive_timeout=KEEP_ALIVE_SECONDS, limit=self._limit)
                self._http = client_session(connector=connector)
            request = self._http.request(method, target, data=data, headers=sent, allow_redirects=False, timeout=limit)
            async with request as reply:
                text = (await read_reply(reply)).decode("utf-8", "replace")
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
    """Return the JSON object in an answer's `text`. `where` names the server.

    Raises:
        failure: it is not a JSON object.
    """
    try:
        reply = read_json(text)
    except ValueError as error:
        raise failure(f"{where} answered no JSON: {error}: {text[:MOST_QUOTED]}") from error
    if not isinstance(reply, dict):
        raise failure(f"{where} answered no JSON object: {text[:MOST_QUOTED]}")
    return reply


PATH = "global_config_dict_yaml"
SECONDS = 30.0
MOST_CONFIGURATION = 2**19
"""Characters of a configuration. The largest take seconds to parse, off the event loop."""
AGENTS, RESOURCES, ENVIRONMENTS = "responses_api_agents", "resources_servers", "environment_servers"
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
    urls = {}
    for name, _ in _servers(tree, AGENTS):
        with suppress(UnknownAgent):
            urls[name] = server_url(tree, name, head.url)
    return urls


async def look_up_verifiers(head: Connection, *, every: str, token: str | None = None) -> dict[str, str]:
    """Return base URLs of the resources servers that judge, by the name of the agent; for a configuration without
    agents, that of its one resources server under `every`.

    Raises:
        InfraError: as `look_up`.
        UnknownAgent: the configuration has several resources servers, but does not name agents.
    """
    tree = await _configuration(head, token)
    servers = dict(_servers(tree, RESOURCES))
    judges = {
        name: tree[name][AGENTS][implementation].get("resources_server")
        for name, implementation in _servers(tree, AGENTS)
    }
    named = {
        agent: str(server["name"])
        for agent, server in judges.items()
        if isinstance(server, Mapping) and str(server.get("name")) in servers
    }
    if not named and len(servers) > 1:
        raise UnknownAgent(f"{head.url} knows no agents, and several resources servers: {', '.join(sorted(servers))}.")
    if not named:
        named = dict(zip([every], servers, strict=False))
    return {agent: _address(tree, server, RESOURCES, servers[server], head.url) for agent, server in named.items()}


def server_url(tree: Any, agent: str, head_url: str) -> str:
    """Return the address in a head server's configuration that plays rows of `agent`: its own, or that of the
    environment server in front of it, unless this is a relay (`legacy_agent`) or one of several.

    Raises:
        UnknownAgent: it, its host or its port is missing.
    """
    known = dict(_servers(tree, AGENTS))
    if agent not in known:
        names = ", ".join(sorted(known)) or "none"
        raise UnknownAgent(f"environment.agent is {agent!r}, which {head_url} does not know. It knows: {names}.")
    fronts = [
        (name, implementation)
        for name, implementation in _servers(tree, ENVIRONMENTS)
        if implementation != RELAY and _plays(tree[name][ENVIRONMENTS][implementation], agent)
    ]
    if len(fronts) == 1:
        return _address(tree, fronts[0][0], ENVIRONMENTS, fronts[0][1], head_url)
    return _address(tree, agent, AGENTS, known[agent], head_url)


def _plays(environment: Mapping[str, Any], agent: str) -> bool:
    """Return True if an environment server's fields refer to the agent."""
    for field, reference in environment.items():
        if isinstance(reference, Mapping) and reference.get("name") == agent:
            kind = reference.get("type", AGENTS if field == "agent_server" else None)
            if kind == AGENTS:
                return True
    return False


def _address(tree: Any, name: str, kind: str, implementation: str, head_url: str) -> str:
    entry = tree[name][kind][implementation]
    host, port, url = (_plain(tree, entry.get(key), f"{head_url}: {key} of {name}") for key in ("host", "port", "url"))
    if url and not entry.get("entrypoint"):
        return _http(url, f"{head_url}: url of {name}")
    if not host or not port:
        raise UnknownAgent(f"{head_url}: {name} has no host and port yet. Is it started?")
    if host in _ANY_HOST:
        host = URL(head_url).host or ""
    if not re.fullmatch(r"[\w.:-]+", host) or not port.isdecimal():
        raise UnknownAgent(
            f"{head_url}: {name} has host {host!r} and port {port!r}. Give the name of a host and a number."
        )
    return _http(
        f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", f"{head_url}: address of {name}"
    )


_REFERENCE = re.compile(r"\$\{([\w-]+(?:\.[\w-]+)*)\}")
_MOST_REFERENCES = 20
"""Followed for one value, so that a circle ends."""
_MOST_CHARACTERS = 2000


def _plain(tree: Any, value: Any, what: str) -> str:
    """Return the text of a value with its references `${a.b}` replaced by the values of the same tree; empty for None.

    Raises:
        UnknownAgent: it is neither text nor number, refers to a missing value or in a circle, or asks for a resolver.
    """
    for _ in range(_MOST_REFERENCES):
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int) or len(text := str(value)) > _MOST_CHARACTERS:
            raise UnknownAgent(f"{what} is a {type(value).__name__}. A text or a number is an address.")
        if "${" not in text:
            return text
        if (reference := _REFERENCE.search(text)) is None:
            raise UnknownAgent(f"{what} is {text!r}. Only references such as ${{servers.host}} are followed.")
        target: Any = tree
        for part in reference[1].split("."):
            if not isinstance(target, Mapping) or part not in target:
                raise UnknownAgent(f"{what} is {text!r}, and the configuration has no {reference[1]}.")
            target = target[part]
        if reference[0] != text and not isinstance(target, str | int):
            raise UnknownAgent(f"{what} is {text!r}, and {reference[1]} is a {type(target).__name__}, not a text.")
        value = target if reference[0] == text else text.replace(reference[0], str(target))
    raise UnknownAgent(f"{what} has more than {_MOST_REFERENCES} references.")


def _http(url: str, what: str) -> str:
    """Return an http(s) URL without its last slash.

    Raises:
        UnknownAgent: it is not such a URL.
    """
    try:
        parts = URL(url)
        usable = parts.scheme in ("http", "https") and parts.host and parts.user is None and not re.search(r"\s", url)
    except ValueError:
        usable = False
    if not usable:
        raise UnknownAgent(f"{what} is {url!r}. Give an http:// or https:// address with a host.")
    return url.rstrip("/")


async def _configuration(head: Connection, token: str | None) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    status, text, _ = await head.exchange("GET", PATH, None, None, headers=headers, seconds=SECONDS)
    if status != 200:
        raise EnvironmentUnavailable(f"{head.url}/{PATH} answered {status}: {text[:500]}")
    try:
        configuration = orjson.loads(text)
        if not isinstance(configuration, str):
            raise ValueError(f"it is {shown(configuration)}")
        if len(configuration) > MOST_CONFIGURATION:
            raise ValueError(f"it has {len(configuration)} characters, and at most {MOST_CONFIGURATION} are read")
        return await asyncio.to_thread(load_yaml, configuration)
    except (ValueError, yaml.YAMLError) as error:
        raise EnvironmentUnavailable(f"{head.url}/{PATH} answered no JSON string of YAML: {error}") from error


def _servers(tree: Any, kind: str) -> Iterator[tuple[str, str]]:
    """Instance name and implementation of each server of a kind."""
    if not isinstance(tree, Mapping):
        return
    for name, entry in tree.items():
        kinds = entry.get(kind) if isinstance(entry, Mapping) else None
        if not isinstance(kinds, Mapping):
            continue
        for implementation, fields in itertools.islice(kinds.items(), 1):
            if isinstance(name, str) and isinstance(implementation, str) and isinstance(fields, Mapping):
                yield name, implementation
