"""A receiver of OTLP for tests, and the reading of spans with OpenTelemetry's own types."""

from __future__ import annotations

import base64
import json
import tarfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "earlier-store.tar.xz"


def recorded_store(place: Path) -> Path:
    """Return a store of two runs, `earlier` and `earlier-async`, that really ran."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return next(place.glob("**/runs")).parent


def parsed(line: bytes) -> ExportTraceServiceRequest:
    """Return a line as the type of OpenTelemetry. Unknown fields are refused; IDs are hexadecimal in OTLP, not base64."""

    def converted(value: Any) -> Any:
        if isinstance(value, list):
            return [converted(each) for each in value]
        if not isinstance(value, dict):
            return value
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            key: base64.b64encode(bytes.fromhex(each)).decode() if key in ids else converted(each)
            for key, each in value.items()
        }

    return Parse(json.dumps(converted(json.loads(line))), ExportTraceServiceRequest())


def spans_of(lines: bytes) -> list[Any]:
    return spans_in([parsed(line) for line in lines.splitlines()])


def spans_in(requests: list[ExportTraceServiceRequest]) -> list[Any]:
    return [
        span for each in requests for part in each.resource_spans for scope in part.scope_spans for span in scope.spans
    ]


def facts(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def seconds(span: Any) -> tuple[float, float]:
    return span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9


class Collector(ThreadingHTTPServer):
    """Answers with the planned replies, then takes everything."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[tuple[int, bytes]] = []
        self.taken: list[bytes] = []
        self.headers: list[dict[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["content-length"]))
        status, answer = server.replies.pop(0) if server.replies else (200, b'{"partialSuccess":{}}')
        server.headers.append({"path": self.path, **{key.lower(): value for key, value in self.headers.items()}})
        if status == 200:
            server.taken.append(body)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
