"""Where a server is, by its instance name, as the head server tells it.

Invariant: only the entry's host and port are resolved; nothing else of the configuration, which may hold secrets, is read.

    {"my_agent": {"responses_api_agents": {"simple_agent": {"host": "127.0.0.1", "port": 10007, …}}}}
    server_url(that, "my_agent", head) == "http://127.0.0.1:10007"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yarl import URL

from roundhouse.compat.nemo_gym.clients.connection import Connection
from roundhouse.config.yaml_text import load_yaml
from roundhouse.rollout.failures import EnvironmentUnavailable, UnknownAgent

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
