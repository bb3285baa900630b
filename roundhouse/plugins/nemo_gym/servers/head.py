"""The head server: it reports the servers and their addresses.

Invariant: it sends secrets only to a caller with the configured bearer token, and to nobody if no token is configured.
Its report shows the running servers: their watcher reports each server's end to it.

    GET /, /livez                  {"status":"ok"}
    GET /health, /healthz, /readyz the same; status 503 while servers are starting
    GET /global_config_dict_yaml   a JSON string that holds YAML
    GET /server_instances          a list of servers

NeMo Gym's clients need only hosts, ports and switches, which are not masked.

`server_statuses` returns the servers, and whether each answers. It asks the servers themselves, at this moment, and
does not repeat the head server's last view. Any HTTP answer counts, because foreign servers need not have a route at
`/`, except 502, 503 and 504: the server, or a proxy before it, reports that it cannot serve yet.

`python -m roundhouse.plugins.nemo_gym.servers.head` serves the configuration of `NEMO_GYM_CONFIG_DICT`. Its servers run
elsewhere: a pod of a run's own servers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import aiohttp
import orjson
from fastapi import FastAPI, Request, Response
from omegaconf import OmegaConf

from roundhouse.errors import InfraError
from roundhouse.http.asgi import presents, serve
from roundhouse.http.clients import client_session
from roundhouse.plugins.nemo_gym.clients.connection import Connection
from roundhouse.plugins.nemo_gym.config.instances import find_instances
from roundhouse.plugins.nemo_gym.config.merging import filled
from roundhouse.plugins.nemo_gym.config.resolve import Resolution
from roundhouse.plugins.nemo_gym.servers.endpoints import json_answer
from roundhouse.plugins.nemo_gym.servers.own_server import CONFIG_DICT

ServerStatus = Literal["success", "connection_error", "timeout", "unknown_error"]


@dataclass(slots=True)
class RunningServer:
    """One line of /server_instances."""

    config_path: str
    dir_path: str | None
    entrypoint: str | None
    host: str
    name: str
    pid: int | None
    port: int
    process_name: str
    server_type: str
    start_time: float
    status: ServerStatus | None
    url: str

    def told(self) -> dict[str, Any]:
        return {**asdict(self), "uptime_seconds": time.time() - self.start_time}


def build_app(
    resolution: Resolution,
    servers: Callable[[], Sequence[RunningServer]],
    token: str | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """Return the head server of a configuration.

    Args:
        servers: returns the servers that run at the moment.
        token: bearer token for the configuration with its secrets.
        ready: returns True once all servers have answered.
    """
    app = FastAPI(title="head")

    @app.get("/livez")
    @app.get("/")
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    @app.get("/healthz")
    @app.get("/health")
    async def readiness() -> Response:
        return json_answer({"status": "ok"}) if ready() else Response('{"status":"starting"}', 503)

    @app.get("/global_config_dict_yaml")
    async def configuration(request: Request) -> Response:
        trusted = token is not None and presents(request.headers.get("authorization", ""), token)
        return json_answer(resolution.yaml() if trusted else resolution.masked_yaml())

    @app.get("/server_instances")
    async def instances() -> Response:
        return json_answer([server.told() for server in servers()])

    return app


HEAD_SECONDS = 5.0
SERVER_SECONDS = 2.0
MOST_SERVERS = 1000


def server_statuses(head_url: str) -> list[dict[str, Any]]:
    """Return the entries of /server_instances with a fresh `status`.

    Raises:
        ConfigError: `head_url` is invalid.
        InfraError: no head server answers there.
    """
    return asyncio.run(ask_statuses(head_url))


async def ask_statuses(head_url: str) -> list[dict[str, Any]]:
    """Do the same as `server_statuses` within an event loop."""
    head = Connection(head_url, HEAD_SECONDS, key="--head")
    try:
        status, text = await head.get("server_instances")
    finally:
        await head.close()
    servers = read_instances(status, text, head_url)
    fresh = await check_all((one.get("url") or "" for one in servers), SERVER_SECONDS)
    return [{**one, "status": server_status} for one, server_status in zip(servers, fresh, strict=True)]


def read_instances(status: int, text: str, head_url: str) -> list[dict[str, Any]]:
    """Return the entries of an answer of /server_instances. Each has a process and a type, and may have an address.

    Raises:
        InfraError: it is another answer, or has more than `MOST_SERVERS` entries.
    """
    try:
        servers = orjson.loads(text) if status == 200 else None
    except orjson.JSONDecodeError:
        servers = None
    if not isinstance(servers, list) or not all(map(_is_instance, servers)):
        raise InfraError(f"{head_url}/server_instances answered {status}: {text[:200]}. Is it a head server?")
    if len(servers) > MOST_SERVERS:
        raise InfraError(
            f"{head_url}/server_instances lists {len(servers)} servers, and at most {MOST_SERVERS} are asked."
        )
    return servers


def _is_instance(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("process_name"), str)
        and isinstance(entry.get("server_type"), str)
        and isinstance(entry.get("url"), str | None)
    )


PROBE_SECONDS = 5.0
NOT_READY = frozenset({502, 503, 504})


async def check(url: str, http: aiohttp.ClientSession, seconds: float = PROBE_SECONDS) -> ServerStatus:
    """One question."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=seconds), allow_redirects=False) as reply:
            return "unknown_error" if reply.status in NOT_READY else "success"
    except TimeoutError:
        return "timeout"
    except aiohttp.ClientConnectionError:
        return "connection_error"
    except (aiohttp.ClientError, ValueError):
        return "unknown_error"


async def check_all(urls: Iterable[str], seconds: float = PROBE_SECONDS) -> list[ServerStatus]:
    """All at once, in order."""
    async with client_session() as http:
        return list(await asyncio.gather(*(check(url, http, seconds) for url in urls)))


def main() -> None:
    """Serve on all addresses, at the configured port, until interrupted."""
    tree: Any = OmegaConf.to_container(OmegaConf.create(os.environ[CONFIG_DICT]))
    resolution = Resolution(tree)
    resolution.take(find_instances(filled(resolution.config()).value)[0])
    started = time.time()

    def servers() -> list[RunningServer]:
        entries = []
        for instance in (*resolution.instances, *resolution.relays):
            host, port = resolution.address(instance)
            entries.append(
                RunningServer(
                    config_path=instance.name,
                    dir_path=None,
                    entrypoint=instance.fields.entrypoint,
                    host=host,
                    name=instance.implementation,
                    pid=None,
                    port=port,
                    process_name=instance.name,
                    server_type=instance.type,
                    start_time=started,
                    status=None,
                    url=resolution.base_url(instance),
                )
            )
        return entries

    serve(build_app(resolution, servers), "0.0.0.0", resolution.head_address()[1])


if __name__ == "__main__":
    main()
