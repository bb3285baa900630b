"""The head server: who asks it learns which servers there are and where.

Invariant: secrets leave it only for a caller that presents the configured bearer token; without a configured token they never
leave it. What it says is what runs: it is told of a server's end by whoever watches the servers.

    GET /                          {"status":"ok"}
    GET /global_config_dict_yaml   a JSON string that holds YAML
    GET /server_instances          a list of servers

NeMo Gym's clients need nothing of it but hosts, ports and switches, which are not masked.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from roundhouse.compat.nemo_gym.config.resolve import Resolution
from roundhouse.compat.nemo_gym.servers.endpoints import json_answer

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
    resolution: Resolution, servers: Callable[[], Sequence[RunningServer]], token: str | None = None
) -> FastAPI:
    """The head server of a configuration.

    Args:
        servers: what runs at the moment of the question.
        token: bearer token for the configuration with its secrets.
    """
    app = FastAPI(title="head")

    @app.get("/")
    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/global_config_dict_yaml")
    async def configuration(request: Request) -> Response:
        trusted = token is not None and presents(request.headers.get("authorization", ""), token)
        return json_answer(resolution.yaml() if trusted else resolution.masked_yaml())

    @app.get("/server_instances")
    async def instances() -> Response:
        return json_answer([server.told() for server in servers()])

    return app


def presents(authorization: str, token: str) -> bool:
    """Is it `Bearer <token>`? Compared in constant time."""
    return hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())
