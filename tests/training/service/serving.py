"""A real server of the train service in a thread, on a port of the system's choice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from roundhouse.config.models import TrainConfig
from roundhouse.http.asgi import token_digest
from roundhouse.training.service.served import ServedTrainEngine
from roundhouse.training.service.server import Service, build_app
from tests.waiting import until


@contextmanager
def listening(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Serve the app; yields its URL. Leaving ends the server."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        until(lambda: server.started, "a server that has started")
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def make_service(
    model: Path, scratch: Path, *, token: str | None = None, idle_seconds: float = 60, max_body_bytes: int = 1 << 24
) -> Service:
    machine = TrainConfig(device="cpu", threads=1)
    engine = ServedTrainEngine(model, machine, scratch)
    known = None if token is None else token_digest(token)
    return Service(engine, token_sha256=known, idle_seconds=idle_seconds, max_body_bytes=max_body_bytes)


@contextmanager
def train_server(model: Path, scratch: Path, *, port: int = 0, **options: object) -> Iterator[str]:
    with listening(build_app(make_service(model, scratch, **options)), port) as url:  # type: ignore[arg-type]
        yield url
