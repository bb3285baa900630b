"""The chat server without Ray: real HTTP around an engine, for the transformers backend and for planted faults."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from roundhouse.config.models import GenerationConfig
from roundhouse.generation.serve_app import start_policy
from roundhouse.weight_sync.replica_state import DesiredPolicy


@contextlib.contextmanager
def transformers_server(policy_dir: Path) -> Iterator[str]:
    """Base URL of the transformers backend with version 1 of a policy."""
    config = GenerationConfig(backend="transformers", max_model_len=512)

    async def application() -> Any:
        policy, server = await start_policy(config, str(policy_dir), "only")
        await policy.apply(DesiredPolicy(policy_version=1, weights=str(policy_dir), request=1))
        return server

    with serve(application) as url:
        yield url


@contextlib.contextmanager
def serve(make_application: Any) -> Iterator[str]:
    """Run an ASGI application, made on the server's own loop, in a thread."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    ready, holder = threading.Event(), {}

    def run() -> None:
        async def main() -> None:
            application = await make_application()
            server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
            holder["server"] = server
            ready.set()
            await server.serve(sockets=[listener])

        try:
            asyncio.run(main())
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    assert "server" in holder, "the application could not be made"
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        holder["server"].should_exit = True
        thread.join(10)
        listener.close()
