"""TCP ports on the loopback interface, and an ASGI application served on one from a thread of this process.

Invariants: a port given out here was free a moment ago and lies below the range from which the kernel gives ports to outgoing
connections, so that no client connection takes it while its service restarts. When `HttpThread`'s constructor has returned, its
port is bound and connections are taken; after `close` they are not. The process's signals stay its own.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Collection

import psutil
from starlette.types import ASGIApp

from roundhouse.errors import InfraError
from roundhouse.http.asgi import SameOrigin

LOOPBACK = "127.0.0.1"
FIRST, LAST = 20_000, 29_999
"""Below Linux's ephemeral range (32768 and up) and Kubernetes' node ports (30000 and up)."""


def is_free(port: int) -> bool:
    """Can a server bind the port now? A connection of an earlier server in TIME_WAIT does not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose(key: str, remembered: int | None, taken: Collection[int]) -> int:
    """A free port: the remembered one when it is, else the first free one from a place that depends on `key` alone.

    So a service keeps its address even after its state was deleted, and two state directories hardly ever compete.
    """
    if remembered is not None and remembered not in taken and is_free(remembered):
        return remembered
    span = LAST - FIRST + 1
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % span
    for offset in range(span):
        port = FIRST + (start + offset) % span
        if port not in taken and is_free(port):
            return port
    raise OSError(f"No free TCP port between {FIRST} and {LAST}.")


def describe_owner(port: int) -> str:
    """Describe the process that listens on the port; empty if the system does not reveal it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "a process of another user"
            try:
                process = psutil.Process(connection.pid)
                return f"process {connection.pid} ({' '.join(process.cmdline())[:120] or process.name()})"
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                return f"process {connection.pid}"
    return ""


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
        import uvicorn  # most callers that choose a port do not serve on it themselves

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
