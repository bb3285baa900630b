"""A proxy before an API server, real or fake, that plants faults: refused calls, lost replies, cut watches, silence."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol
from urllib.parse import urlsplit

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "host"}

LOST, TORN, EXPIRED = 0, -1, -2
"""What is no status: the call is carried out and its reply lost; an answer that is streamed breaks off in the middle of its
first line; a watch is told that its version is gone (410)."""


@dataclass
class Fault:
    """A fault for the next matching calls."""

    status: int
    """Answered instead of passing the call on; or LOST, TORN, EXPIRED."""
    method: str = ""
    path: str = ""
    """Both empty: any call."""
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    reason: str = "Planted"


class Draws(Protocol):
    """Source of faults that are not planted singly (`fault_plan`)."""

    def draw(self, method: str, path: str) -> Fault | None: ...


class Faults:
    """Planned faults and recorded calls."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None) -> None:
        self.upstream = urlsplit(upstream)
        self.tls = tls
        self.planted: list[Fault] = []
        self.plan: Draws | None = None
        self.away = False
        """Every connection is closed without an answer."""
        self.seen: list[tuple[str, str]] = []
        self._streams: set[socket.socket] = set()
        self._lock = threading.Lock()

    def plant(self, status: int, method: str = "", path: str = "", times: int = 1, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.planted.append(Fault(status, method, path, times, named))

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.seen.append((method, path))
            for fault in self.planted:
                if fault.times > 0 and fault.method in ("", method) and fault.path in path:
                    fault.times -= 1
                    return fault
            return None if self.plan is None else self.plan.draw(method, path)

    def cut_streams(self) -> int:
        """Break every answer that is being streamed; how many there were."""
        with self._lock:
            cut = list(self._streams)
        for connection in cut:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return len(cut)

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.upstream.hostname or "", self.upstream.port
        if self.tls is not None:
            return http.client.HTTPSConnection(host, port, context=self.tls, timeout=300)
        return http.client.HTTPConnection(host, port, timeout=300)

    @contextmanager
    def streaming(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._streams.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._streams.discard(connection)


class _Pass(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults

    def log_message(self, *_: object) -> None:
        pass

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.faults.fault_for(self.command, self.path)
        if self.faults.away:
            self.close_connection = True
            return
        if fault is not None and fault.status > 0:
            data = json.dumps(
                {"kind": "Status", "code": fault.status, "reason": fault.reason, "message": "planted"}
            ).encode()
            self.send_response(fault.status)
            for name, value in fault.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        upstream = self.faults.connect()
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            if fault is None or (fault.status != LOST and not answer.chunked):
                self._answer(answer)
                return
            self.close_connection = True
            if fault.status == LOST:
                answer.read()
            else:
                self._break(answer, fault.status)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            upstream.close()

    def _answer(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if not answer.chunked:
            data = answer.read()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.faults.streaming(self.connection):
            while data := answer.read1(65536):
                self._chunk(data)
            self.wfile.write(b"0\r\n\r\n")

    def _break(self, answer: http.client.HTTPResponse, how: int) -> None:
        """Begin the streamed answer, then break the connection."""
        self.send_response(answer.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if how == EXPIRED:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._chunk(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        with self.faults.streaming(self.connection):
            piece = answer.read1(65536)
            self._chunk(piece[: len(piece) // 2])

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _pass


@contextmanager
def fault_proxy(upstream: str, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, Faults]]:
    """URL of the proxy, over plain HTTP, and its faults."""
    faults = Faults(upstream, tls)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Pass", (_Pass,), {"faults": faults}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        faults.cut_streams()
        server.shutdown()
        server.server_close()
