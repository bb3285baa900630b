"""The suite's own machinery: forked workers run each test once, and programs of the fork server are separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.workers import ForkedWorkers

def pytest_configure(config):
    config.pluginmanager.register(ForkedWorkers(2, lambda nodeid: nodeid.split("::")[0]))

@pytest.fixture(scope="session")
def shared():
    print("set up")
    yield
    open("torn down", "a").write("x")
"""
CRASHING = """
import os

def test_before(shared):
    pass

def test_crashing():
    os._exit(3)

def test_after(shared):
    pass
"""
PYTEST = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
SOUND = "import pytest\n\n@pytest.mark.parametrize('n', range(20))\ndef test_sound(n, shared):\n    assert n != 7\n"


def run_suite(directory: Path, *options: str) -> str:
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_crashing.py").write_text(CRASHING)
    (directory / "test_sound.py").write_text(SOUND)
    ended = fork_server.run(
        [
            sys.executable,
            "-c",
            "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))",
            "-q",
            "-p",
            "no:cacheprovider",
            *options,
        ],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.real
def test_a_test_that_ends_its_worker_fails_alone_and_all_others_run_once(tmp_path: Path) -> None:
    output = run_suite(tmp_path)
    assert "its worker ended while it ran test_crashing.py::test_crashing" in output
    assert "assert 7 != 7" in output
    assert "2 failed, 21 passed" in output
    assert (tmp_path / "torn down").read_text() == "xx", (
        "each worker that lived tears its fixture of the session down once"
    )


@pytest.mark.real
def test_the_first_failure_stops_all_workers(tmp_path: Path) -> None:
    assert "1 failed" in run_suite(tmp_path, "-x")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("raise ValueError(1)", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_a_forked_program_ends_with_its_own_status(code: str, status: int) -> None:
    assert fork_server.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, timeout=60).returncode == status


def test_a_forked_program_has_its_own_streams_directory_and_environment(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.stdin.read(), os.getcwd(), os.environ['OWN'], 'PATH' in os.environ, sys.argv[1:])"
    ended = fork_server.run(
        [sys.executable, "-c", code, "word"],
        input="in",
        cwd=tmp_path,
        env={"OWN": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout == f"in {tmp_path} 1 False ['word']\n", ended.stderr


def test_a_forked_program_takes_signals() -> None:
    with fork_server.start(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    ) as p:
        assert p.stdout.readline() == b"up\n"
        p.send_signal(signal.SIGTERM)
        assert p.wait(60) == -signal.SIGTERM
