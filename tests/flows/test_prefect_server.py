"""Prefect's server on SQLite: it does not stand still while a connection waits, and asks a busy database again."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy.exc
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prefect.server.api.server import custom_internal_exception_handler

from roundhouse_flows._prefect.server import AsksAgain

pytestmark = pytest.mark.real

WAITS_SECONDS = 6.0
PROGRAM = f"""
import sqlite3, sys, threading, time
path = sys.argv[1]
if sys.argv[2] == "elsewhere":
    from roundhouse_flows._prefect.server import collect_garbage_elsewhere
    collect_garbage_elsewhere()
holder = sqlite3.connect(path, isolation_level=None)
holder.execute("CREATE TABLE t (x)")
other = sqlite3.connect(path, isolation_level=None, timeout={WAITS_SECONDS}, check_same_thread=False)
garbage = [other.execute("VALUES (1), (2)")]
holder.execute("BEGIN IMMEDIATE")

begins = threading.Event()

def write():
    begins.set()
    try:
        other.execute("INSERT INTO t VALUES (3)")
    except sqlite3.OperationalError:
        pass

waiting = threading.Thread(target=write)
waiting.start()
begins.wait()
time.sleep(0.5)  # it waits for the lock, and its connection is locked
garbage.append(garbage)
del garbage
began = time.monotonic()
kept = [[] for _ in range(200_000)]  # what an event loop does: it allocates
print(time.monotonic() - began)
time.sleep(1)  # long enough for the other thread to have met the garbage
holder.execute("ROLLBACK")
print(time.monotonic() - began)
waiting.join()
"""


@pytest.mark.parametrize(("where", "stands_still"), [("here", True), ("elsewhere", False)])
def test_garbage_that_waits_for_a_connection_holds_up_only_the_thread_that_collects_it(
    tmp_path: Path, where: str, stands_still: bool
) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "db"), where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert ended.returncode == 0, ended.stderr
    allocated, rolled_back = map(float, ended.stdout.split())
    assert (allocated > WAITS_SECONDS / 3) is stands_still, "with Python's own collection the rest of the wait is met"
    assert stands_still or rolled_back < WAITS_SECONDS


def test_the_server_collects_garbage_in_a_thread_of_its_own(tmp_path: Path) -> None:
    program = """
import gc, threading, time, weakref
from roundhouse_flows._prefect import server
class Node: pass
server.collect_garbage_elsewhere()
assert not gc.isenabled()
first = Node(); first.itself = first
gone = weakref.ref(first)
del first
deadline = time.monotonic() + 60
while gone() is not None and time.monotonic() < deadline:
    kept = [[] for _ in range(10_000)]
    time.sleep(0.05)
assert gone() is None
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 0, ended.stderr


class Database:
    """An application like Prefect's with a database that is busy for the first calls."""

    def __init__(self, busy: int, error: Exception) -> None:
        self.calls: list[Any] = []
        self.app = FastAPI()
        part = FastAPI(exception_handlers={Exception: custom_internal_exception_handler})
        self.app.mount("/api", part)  # Prefect's is a part, too

        @part.post("/resume")
        async def resume(request: Request) -> dict[str, Any]:
            self.calls.append(await request.json())
            if len(self.calls) <= busy:
                raise error
            return {"calls": len(self.calls)}

        @part.get("/ready")
        async def ready() -> JSONResponse:
            self.calls.append(None)
            return JSONResponse({"message": "Database is not available"}, 503)

    async def ask(self, method: str, path: str, seconds: float = 10.0) -> httpx.Response:
        transport = httpx.ASGITransport(AsksAgain(self.app, seconds), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://prefect") as client:
            return await client.request(method, path, json={"run_input": {"comment": "yes"}})


def refused(text: str) -> Exception:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorname = "SQLITE_BUSY_SNAPSHOT" if "locked" in text else "SQLITE_ERROR"
    return sqlalchemy.exc.OperationalError("UPDATE flow_run", {}, error)


async def test_a_request_that_the_busy_database_refused_is_made_again_whole() -> None:
    database = Database(3, refused("database is locked"))
    reply = await database.ask("POST", "/api/resume")
    assert (reply.status_code, reply.json()) == (200, {"calls": 4})
    assert database.calls == 4 * [{"run_input": {"comment": "yes"}}]


async def test_a_database_that_stays_busy_is_told_in_time() -> None:
    database = Database(1000, refused("database is locked"))
    reply = await database.ask("POST", "/api/resume", seconds=0.5)
    assert (reply.status_code, reply.json()) == (503, {"exception_message": "Service Unavailable"})
    assert 3 <= len(database.calls) <= 20


@pytest.mark.parametrize("error", [refused("no such column"), ValueError("a defect")])
async def test_another_error_is_not_tried_again(error: Exception) -> None:
    database = Database(1, error)
    assert (await database.ask("POST", "/api/resume")).status_code == 500
    assert len(database.calls) == 1


async def test_an_answer_that_the_server_is_not_ready_is_passed_on() -> None:
    database = Database(0, ValueError())
    reply = await database.ask("GET", "/api/ready")
    assert (reply.status_code, reply.json()) == (503, {"message": "Database is not available"})
    assert len(database.calls) == 1


def test_the_servers_command_starts_the_server_that_asks_again_and_is_no_other_sites() -> None:
    program = """
from roundhouse_flows._prefect import server
server.wrap_server()
from prefect.server.api.server import create_app
app = create_app(ephemeral=True)
assert isinstance(app, server.SameOrigin)
assert isinstance(app._app, server.AsksAgain)
assert create_app(ephemeral=True) is app
import asyncio
from prefect.server.api.clients import OrchestrationClient
async def ask():
    async with OrchestrationClient() as client:
        return (await client._http_client.get("/admin/version")).status_code
assert asyncio.run(ask()) == 200  # as the server's automations ask it
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 0, ended.stderr
