"""A real MLflow server in this process with requests that a test can let fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.ports import free_port

Faults = Callable[[str], str]
"""For the path of a request: `""` (it is answered), `hang`, `500`, `garbage` or `die` (until it is started again)."""


class FaultyServer:
    """MLflow's own application behind a gate."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self.fault: Faults = lambda path: ""
        self.refused = threading.Event()
        """Set once a request was not answered as it should be."""
        self._released = threading.Event()
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.fault, self._released = (lambda path: ""), threading.Event()
        options = uvicorn.Config(
            self._gate, host="127.0.0.1", port=self.port, log_level="critical", lifespan="off", interface="asgi3"
        )
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.01)

    def stop(self) -> None:
        self._released.set()
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()

    async def _gate(self, scope: Any, receive: Any, send: Any) -> None:
        fault = self.fault(scope.get("path", ""))
        if fault:
            self.refused.set()
        if fault == "hang":
            await asyncio.to_thread(self._released.wait)
        if fault == "die":
            self.fault = lambda path: "die"
            self._server.force_exit = self._server.should_exit = True
        if not fault:
            await self._application(scope, receive, send)
            return
        status = 200 if fault == "garbage" else 500
        headers = [(b"content-type", b"text/html")]
        with contextlib.suppress(RuntimeError):
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"<html>no</html>"})


@contextlib.contextmanager
def faulty_server(directory: Path, patch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server with a separate database and artifacts under `directory`."""
    patch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{directory}/mlflow.db")
    patch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
    patch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", str(directory / "artifacts"))
    patch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
    import mlflow
    from mlflow.server import handlers
    from mlflow.server.fastapi_app import app

    handlers._get_tracking_store()
    handlers._get_model_registry_store()
    mlflow.set_registry_uri("")  # the server has just set both for its own process, which is the clients' too
    patch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    server = FaultyServer(app)
    try:
        yield server
    finally:
        server.stop()
