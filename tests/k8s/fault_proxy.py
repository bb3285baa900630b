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
from urllib.parse import urlsplit

_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "host"}


@dataclass
class Fault:
    """What happens to the next calls that fit."""

    status: int
    """Answered instead of passing the call on; 0 cuts the connection after the call was carried out, its reply lost."""
    method: str = ""
    path: str = ""
    """Both empty: any call."""
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    reason: str = "Planted"


class Faults:
    """The faults to come, and what was asked."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None) -> None:
        self.upstream = urlsplit(upstream)
        self.tls = tls
        self.planted: list[Fault] = []
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
        return None

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
        if fault is not None and fault.status:
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
            if fault is not None:
                answer.read()
                self.close_connection = True
                return
            self._answer(answer)
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
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

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
