"""An engine in a separate process, without Ray: the replica's chat server and one control route.

Invariant: requests and refits use the same `ServedPolicy` as under Ray Serve, so answers are labelled in the same way.
A token authorises changes of the wanted weights; it may be omitted only on the loopback interface.

    POST /rh/desired   {"generation": {…}, "model_dir": "…", "desired": {"policy_version": 3, "weights": "file:///…"}}
                    starts the engine, replaces it if its arguments changed, and refits it in place. The old one ends
                    before the new one starts, because a GPU lacks room for both. Requests get 503 in the meantime, as
                    do
                    those in flight.
    …               as a replica: /v1/chat/completions, /rh/status, /rh/replicas, /health

    ROUNDHOUSE_ENGINE_TOKEN=… python -m roundhouse.generation.standalone --port 9000
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from roundhouse.imports import gc_paused

with gc_paused():
    import orjson
    import uvicorn

    from roundhouse.config.generation import TOKEN_VARIABLE
    from roundhouse.config.models import GenerationConfig
    from roundhouse.config.secrets import read_secret
    from roundhouse.errors import RoundhouseError
    from roundhouse.generation.chat_server import ChatServer
    from roundhouse.generation.serve_app import check_model_directory, start_policy
    from roundhouse.generation.served_policy import ServedPolicy
    from roundhouse.http.asgi import (
        BodyLimit,
        Receive,
        SameOrigin,
        Send,
        authorized,
        is_loopback,
        read_body,
        reply_error,
        reply_json,
    )
    from roundhouse.http.ports import LOOPBACK, HttpThread
    from roundhouse.logs import set_up_logs
    from roundhouse.weight_sync.checkpoint_files import local_path
    from roundhouse.weight_sync.replica_state import DesiredPolicy, application_digest

logger = logging.getLogger(__name__)


class StandaloneEngine:
    """The ASGI application. It holds no engine until one is asked for."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._policy: ServedPolicy | None = None
        self._server: ChatServer | None = None
        self._application = ""
        self._changing = asyncio.Lock()
        self._starting: set[asyncio.Task[dict[str, Any]]] = set()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (scope["method"], scope["path"]) == ("POST", "/rh/desired"):
            await self._apply(scope, receive, send)
        elif self._server is not None:
            await self._server(scope, receive, send)
        elif scope["path"] == "/rh/replicas":
            await reply_json(send, 200, {"replicas": []})
        else:
            text = "No engine is loaded: it is starting, or was not requested (POST /rh/desired)."
            await reply_error(send, 503, "policy_unavailable", text)

    async def _apply(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if not await authorized(scope, send, self._token, f"the engine's token ({TOKEN_VARIABLE})"):
            return
        try:
            body = orjson.loads(await read_body(receive))
            arguments = {"generation": body["generation"], "model_dir": body["model_dir"]}
            desired = DesiredPolicy.parse(body["desired"])
            GenerationConfig.model_validate(arguments["generation"])
            if (path := local_path(arguments["model_dir"])) is not None:
                check_model_directory(str(path))
        except (ValueError, KeyError, TypeError, RoundhouseError) as error:
            await reply_error(send, 400, "bad_request", f"{type(error).__name__}: {error}")
            return
        task = asyncio.create_task(self._bring(arguments, desired))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        if desired.weights is None:
            await reply_json(send, 202, {"replicas": []})
            return
        try:
            status = await asyncio.shield(task)
        except Exception as error:
            logger.exception("the engine cannot be started")
            await reply_error(send, 500, "engine_error", f"{type(error).__name__}: {error}")
            return
        await reply_json(send, 200, {"replicas": [status]})

    async def _bring(self, arguments: dict[str, Any], wanted: DesiredPolicy) -> dict[str, Any]:
        """Bring the engine to the wanted state and return its status."""
        async with self._changing:
            digest = application_digest(arguments)
            if self._policy is None or digest != self._application:
                config = GenerationConfig.model_validate(arguments["generation"])
                if self._policy is not None:
                    old, self._policy, self._server = self._policy, None, None
                    await old.close()
                    del old  # its memory goes with it
                self._policy, self._server = await start_policy(
                    config, arguments["model_dir"], f"process-{os.getpid()}", digest
                )
                self._application = digest
            await self._policy.apply(wanted)
            return self._policy.status()


@functools.cache
def engine_of_this_process() -> str:
    """Base URL of an engine in a thread of this process, which is started by the first call, for others on this machine."""
    server = HttpThread(BodyLimit(StandaloneEngine(read_secret(TOKEN_VARIABLE))), LOOPBACK, 0)
    return f"http://{LOOPBACK}:{server.port}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m roundhouse.generation.standalone", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    options = parser.parse_args(arguments)
    try:
        set_up_logs()
        token = read_secret(TOKEN_VARIABLE)
    except RoundhouseError as error:
        sys.exit(f"engine: {error}")
    if token is None and not is_loopback(options.host):
        sys.exit(
            f"engine: --host {options.host} is open to others; set {TOKEN_VARIABLE} or {TOKEN_VARIABLE}_FILE, or listen on "
            "127.0.0.1."
        )
    application: Any = SameOrigin(BodyLimit(StandaloneEngine(token)), options.host)
    uvicorn.run(
        application, host=options.host, port=options.port, log_level="warning", access_log=False, lifespan="off"
    )


if __name__ == "__main__":
    main()
