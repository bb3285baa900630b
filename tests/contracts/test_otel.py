"""Rotel, a collector of OpenTelemetry: it takes a run's spans as JSON and passes all of them on as Protobuf."""

from __future__ import annotations

import gzip
import itertools
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from roundhouse.cli import app
from tests.plugins.otel.receivers import Collector, recorded_store, spans_in, spans_of
from tests.ports import free_port
from tests.waiting import until

pytestmark = [pytest.mark.contract("rotel-0.0.1a15"), pytest.mark.timeout(600)]


def test_a_collector_passes_each_span_on_as_it_is_in_the_file(foreign_python: Path, tmp_path: Path) -> None:
    [agent] = foreign_python.parents[1].glob("lib/python*/site-packages/rotel/rotel-agent")
    store, file = recorded_store(tmp_path), tmp_path / "spans.jsonl"
    words = ["otel", "export", "earlier", "--store", str(store), "--messages"]
    assert CliRunner().invoke(app, [*words, "-o", str(file)]).exit_code == 0
    receiver = Collector()
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    http, grpc = free_port(), free_port()
    options = {
        "--otlp-http-endpoint": f"127.0.0.1:{http}",
        "--otlp-grpc-endpoint": f"127.0.0.1:{grpc}",
        "--exporter": "otlp",
        "--otlp-exporter-protocol": "http",
        "--otlp-exporter-endpoint": f"http://127.0.0.1:{receiver.server_port}",
    }
    with (tmp_path / "log").open("wb") as log:
        command = [str(agent), "start", *(word for pair in options.items() for word in pair)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": "/usr/bin:/bin"})
        try:
            done = CliRunner().invoke(app, [*words, "--endpoint", f"http://127.0.0.1:{http}"])
            assert done.output == "156 spans in 1 requests\n", (tmp_path / "log").read_text()
            until(lambda: bool(receiver.taken))
        finally:
            process.terminate()
            process.wait(30)
            receiver.shutdown()
            receiver.server_close()
    zipped = [headers.get("content-encoding") == "gzip" for headers in receiver.headers]
    bodies = [gzip.decompress(body) if packed else body for body, packed in zip(receiver.taken, zipped, strict=True)]
    theirs = spans_in([ExportTraceServiceRequest.FromString(body) for body in bodies])
    ours = spans_of(file.read_bytes())
    assert len(theirs) == len(ours) == 156
    assert sorted(map(rounded, theirs)) == sorted(map(rounded, ours))


def rounded(span: Any) -> str:
    """Return a span as text, with its numbers in 12 digits: Rotel's reader of JSON is off by one in the last bit of a few."""
    facts = itertools.chain(span.attributes, *(event.attributes for event in span.events))
    for value in (each.value for each in facts if each.value.HasField("double_value")):
        value.double_value = float(f"{value.double_value:.12g}")
    return str(span)
