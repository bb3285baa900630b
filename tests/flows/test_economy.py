"""A busy Prefect server is asked again soon, and as patiently as ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.settings import get_current_settings

from roundhouse_flows._prefect import tuning

PREFECT_PAUSE = 2.0
"""Seconds that Prefect's client waits before it asks a second time, four the third time."""


class Busy(ThreadingHTTPServer):
    """Answers 503 so many times, then well."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.refusals = 0
        self.asked = 0
        self.headers: dict[str, str] = {}


class _Answer(BaseHTTPRequestHandler):
    server: Busy

    def do_GET(self) -> None:
        self.server.asked += 1
        busy = self.server.asked <= self.server.refusals
        self.send_response(503 if busy else 200)
        for name, value in self.server.headers.items() if busy else ():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def busy() -> Iterator[Busy]:
    with Busy() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def ask(kind: str, url: str) -> None:
    if kind == "sync":
        with tuning.PrefectHttpxSyncClient() as client:
            client.get(url)
        return

    async def asked() -> None:
        async with tuning.PrefectHttpxAsyncClient() as client:
            await client.get(url)

    asyncio.run(asked())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_that_is_busy_for_a_moment_costs_a_moment(busy: Busy, kind: str) -> None:
    busy.refusals = 2
    began = time.monotonic()
    ask(kind, f"http://127.0.0.1:{busy.server_port}")
    assert busy.asked == 3
    assert time.monotonic() - began < PREFECT_PAUSE


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the sleeps of this thread instead of sleeping; other threads sleep."""
    this, asleep, asked = threading.get_ident(), time.sleep, list[float]()
    monkeypatch.setattr(time, "sleep", lambda s: asked.append(s) if threading.get_ident() == this else asleep(s))
    return asked


def test_who_stays_busy_is_asked_with_growing_pauses_to_the_end(busy: Busy, pauses: list[float]) -> None:
    busy.refusals = 5
    ask("sync", f"http://127.0.0.1:{busy.server_port}")
    assert busy.asked == 6
    assert len(pauses) == 5
    assert sum(pauses[: len(tuning.SOON_SECONDS)]) < 1
    assert pauses[3] > 2**4 / 2
    assert pauses[4] > 2**5 / 2


def test_a_pause_that_the_server_names_is_kept(busy: Busy, pauses: list[float]) -> None:
    busy.refusals, busy.headers = 1, {"Retry-After": "7"}
    ask("sync", f"http://127.0.0.1:{busy.server_port}")
    assert len(pauses) == 1
    assert pauses[0] >= 7


def test_a_flow_runs_at_the_server_of_the_environment_also_if_prefect_was_imported_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    server = tuning.tagged(lambda: get_current_settings().api.url, "tag")
    assert server() == "http://127.0.0.1:1/api"
    monkeypatch.delenv("PREFECT_API_URL")
    assert server() is None
