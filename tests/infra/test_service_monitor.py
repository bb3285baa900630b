"""A service monitor abandons a service that keeps dying, and cleans up after it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from roundhouse.http import ports
from roundhouse.infra import processes, service_monitor
from roundhouse.infra.service_monitor import ServiceMonitor
from roundhouse.infra.service_specs import SERVICE_SPECS, Launch, ServiceSpec
from roundhouse.infra.state import ServiceRecord, StateDirectory

SHORT_LIVED = """
import http.server, subprocess, sys, threading
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
threading.Timer(0.6, server.shutdown).start()
server.serve_forever()
sys.exit(3)
"""


@pytest.mark.real
async def test_a_service_that_keeps_dying_is_given_up_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(state: StateDirectory, numbers: dict[str, int]) -> Launch:
        url = f"http://127.0.0.1:{numbers['http']}"
        return Launch([sys.executable, "-c", SHORT_LIVED, str(numbers["http"])], url, "/")

    monkeypatch.setitem(SERVICE_SPECS, "short-lived", ServiceSpec(("http",), launch))
    monkeypatch.setattr(service_monitor, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(service_monitor, "RESTARTS", 2)
    state = StateDirectory(tmp_path)
    state.create()
    record = ServiceRecord("short-lived", ports={"http": ports.choose(str(tmp_path), None, [])})
    history: list[str] = []
    one = ServiceMonitor(state, record, dict(os.environ), str(tmp_path), lambda: history.append(record.status))
    await asyncio.wait_for(one.keep(), 60)
    assert record.status == "failed"
    assert "exit code 3" in record.detail
    assert "restarted 2 times" in record.detail
    assert history.count("ready") == 3
    assert processes.members(state) == []


LATE = """
import http.server, pathlib, sys
seen = pathlib.Path("seen")
if not seen.exists():
    seen.touch()
    sys.exit("nobody came")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@pytest.mark.real
@pytest.mark.parametrize(("part_seconds", "ends"), [(0.0, "ready"), (600.0, "failed")])
async def test_a_first_start_that_ends_is_tried_again_only_where_it_had_waited_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_seconds: float, ends: str
) -> None:
    def launch(state: StateDirectory, numbers: dict[str, int]) -> Launch:
        url = f"http://127.0.0.1:{numbers['http']}"
        return Launch([sys.executable, "-c", LATE, str(numbers["http"])], url, "/")

    monkeypatch.setitem(SERVICE_SPECS, "late", ServiceSpec(("http",), launch, part_seconds=part_seconds))
    monkeypatch.setattr(service_monitor, "FIRST_PAUSE_SECONDS", 0.01)
    state = StateDirectory(tmp_path)
    state.create()
    record = ServiceRecord("late", ports={"http": ports.choose(str(tmp_path), None, [])})
    reached = asyncio.Event()
    one = ServiceMonitor(
        state, record, dict(os.environ), str(tmp_path), lambda: reached.set() if record.status == ends else None
    )
    kept = asyncio.create_task(one.keep())
    await asyncio.wait_for(reached.wait(), 60)
    assert record.restarts == (1 if ends == "ready" else 0)
    kept.cancel()
    await asyncio.wait([kept])
    assert processes.members(state) == []
