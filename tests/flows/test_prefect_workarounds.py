"""The workarounds in flows/_prefect are still needed. Where a test fails, its module can go, or must be looked at."""

from __future__ import annotations

import os
import pkgutil
import sqlite3
import sys
import threading
import time
import warnings
from datetime import UTC, datetime, timedelta
from importlib import import_module, reload
from importlib.metadata import version
from pathlib import Path

import prefect.server.services
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.states import Running, Suspended

import roundhouse_flows._prefect
from roundhouse_flows._prefect.reruns import pin_subflow_index
from tests import fork_server
from tests.flows.served import Served

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def printed(program: str, **variables: str) -> list[str]:
    """The words that a Python program prints."""
    ended = fork_server.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env=os.environ | variables,
    )
    return ended.stdout.split()


@flow(name="child", persist_result=True, result_serializer="json")
def child(number: int) -> int:
    return number


def test_the_installed_prefect_is_the_one_that_the_workarounds_were_checked_with() -> None:
    assert version("prefect") == roundhouse_flows._prefect.CHECKED_WITH


def test_another_prefect_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.0")
    with pytest.warns(RuntimeWarning, match=r"Prefect 99\.0 is installed"):
        reload(roundhouse_flows._prefect)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reload(roundhouse_flows._prefect)


def test_each_module_is_in_the_table_of_workarounds() -> None:
    modules = {path.stem for path in Path(roundhouse_flows._prefect.__file__).parent.glob("*.py")} - {"__init__"}
    rows = [
        line.split("`")[1] for line in (roundhouse_flows._prefect.__doc__ or "").splitlines() if line.startswith("| `")
    ]
    assert sorted(rows) == sorted(modules)
    assert all(import_module(f"roundhouse_flows._prefect.{name}").__doc__ for name in modules)


def test_reruns_a_parent_that_runs_again_is_handed_the_result_of_another_sub_flow(prefect_client: Served) -> None:
    @flow(name="parent")
    def parent() -> tuple[int, int, int]:
        context = FlowRunContext.get()
        assert context is not None
        first = child(1)
        context.task_run_dynamic_keys.clear()  # as in the second run of the parent, which begins at iteration 2
        mistaken = child(2)
        pin_subflow_index(child, 2)
        return first, mistaken, child(2)

    assert parent() == (1, 1, 2)


def test_signals_a_termination_that_is_raised_in_a_finalizer_is_dropped() -> None:
    program = """
import signal

def raised(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, raised)

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        sum(range(10))

Finalized()
print("dropped")
"""
    assert printed(program) == ["dropped"]


def test_tuning_prefect_imports_pandas_where_it_is_installed() -> None:
    pytest.importorskip("pandas")
    assert printed("import prefect.main, prefect.cache_policies, sys; print('pandas' in sys.modules)") == ["True"]


def test_server_garbage_of_a_connection_that_waits_for_the_write_lock_blocks_whoever_collects_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "database"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.executescript("CREATE TABLE kept(x); PRAGMA journal_mode=WAL; BEGIN IMMEDIATE")
    waiting = sqlite3.connect(path, timeout=2, isolation_level=None, check_same_thread=False)
    garbage = [waiting.execute("SELECT 1 UNION ALL SELECT 2") for _ in range(1000)]

    def write() -> None:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            waiting.execute("INSERT INTO kept VALUES (1)")

    thread, longest = threading.Thread(target=write), 0.0
    thread.start()
    while thread.is_alive() and garbage:
        began = time.monotonic()
        garbage.pop()
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.005)  # the thread takes a while to reach its wait
    thread.join()
    assert longest > 0.5


def test_server_a_busy_database_is_answered_by_503_and_not_asked_again() -> None:
    program = """
import sqlite3
from fastapi.testclient import TestClient
from prefect.server.api import server
from sqlalchemy.exc import OperationalError

busy, asked = sqlite3.OperationalError("database is locked"), []
busy.sqlite_errorname = "SQLITE_BUSY"
handlers = {Exception: server.custom_internal_exception_handler}  # as `create_app` has them
app = server.create_api_app(fast_api_app_kwargs={"exception_handlers": handlers})

@app.get("/busy")
def raise_busy():
    asked.append(1)
    raise OperationalError("UPDATE", None, busy)

print(TestClient(app, raise_server_exceptions=False).get("/busy", auth=("user", "word")).status_code, len(asked))
"""
    assert printed(program, PREFECT_SERVER_API_AUTH_STRING="user:word") == ["503", "1"]


def test_orphans_no_service_of_the_server_looks_after_flow_runs_whose_process_is_gone() -> None:
    services = {module.name for module in pkgutil.iter_modules(prefect.server.services.__path__)}
    assert services == {
        "base", "cancellation_cleanup", "cleanup_reconciler", "db_vacuum", "foreman", "late_runs", "pause_expirations",
        "perpetual_services", "repossessor", "scheduler", "task_run_recorder", "telemetry",
    }  # fmt: skip


def test_suspension_a_flow_run_whose_suspension_has_ended_cannot_be_resumed(prefect_client: Served) -> None:
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(child, parameters={"number": 1}, state=Running())
        over = Suspended(pause_expiration_time=datetime.now(UTC) - timedelta(hours=1))
        client.set_flow_run_state(flow_run.id, over, force=True)
        assert client.resume_flow_run(flow_run.id).status is not SetStateStatus.ACCEPT


def test_delivery_the_end_of_a_flow_run_leaves_its_log_in_the_queue(prefect_client: Served) -> None:
    program = """
from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from roundhouse_flows._prefect.delivery import deliver_queued_records

@flow
def logging_flow():
    get_run_logger().info("queued")
    return flow_run.id

def lines():
    with get_client(sync_client=True) as client:
        found = client.request("POST", "/logs/filter", json={"logs": {"flow_run_id": {"any_": [run_id]}}}).json()
    return any(line["message"] == "queued" for line in found)

run_id = logging_flow()
before = lines()
deliver_queued_records()
print(before, lines())
"""
    variables = prefect_client.services.environment() | {"PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "600"}
    assert printed(program, **variables) == ["False", "True"]
