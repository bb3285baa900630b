"""An ASGI application served from a thread of this process.

Invariant: when the constructor has returned, the port is bound and connections are taken; after `close` they are not. The
process's signals stay its own.
"""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from roundhouse.errors import InfraError
from roundhouse.http.ports import describe_owner
from roundhouse.http.same_origin import SameOrigin

CLOSE_SECONDS = 5.0


class HttpThread:
    """One server."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """
        Args:
            port: 0 takes any free one.

        Raises:
            InfraError: the address cannot be bound.
        """
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            owner = describe_owner(port)
            raise InfraError(
                f"{host}:{port} cannot be bound: {error.strerror}{f'; {owner} has it' if owner else ''}. Choose another port."
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(SameOrigin(app, host), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True, name="http"
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS)
        self._socket.close()
