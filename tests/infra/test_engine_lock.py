"""One engine, one run at a time: the second run waits until the first has ended in any way."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roundhouse.infra.services import engine_lock
from roundhouse.infra.state import StateDirectory

HOLD = """
import sys
from roundhouse.infra.services import engine_lock
from roundhouse.infra.state import StateDirectory

with engine_lock(StateDirectory(sys.argv[1]), "first"):
    print("has it", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    found = StateDirectory(tmp_path / "services")
    found.create()
    return found


@contextmanager
def other_run(state: StateDirectory) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the engine."""
    command = [sys.executable, "-c", HOLD, str(state.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "has it\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("end", [subprocess.Popen.kill, lambda process: process.stdin.close()], ids=["killed", "done"])
def test_a_run_waits_for_the_one_that_has_the_engine_and_goes_on_when_that_has_ended(
    state: StateDirectory, end: Callable[[subprocess.Popen[str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    had, done = threading.Event(), threading.Event()

    def second() -> None:
        with engine_lock(state, "second"):
            had.set()
            done.wait(30)

    with other_run(state) as process:
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not had.wait(1.5)
        said = [record.getMessage() for record in caplog.records if record.name == "roundhouse.infra.services"]
        assert len(said) == 1, "it says so once"
        assert f"run first (process {process.pid}) uses the engine of" in said[0]
        assert "infra.state" in said[0]
        end(process)
        assert had.wait(30)
        assert state.engine_use().run_id == "second"
    done.set()
    waiting.join(30)
    assert state.engine_use() is None


def test_a_process_that_has_the_engine_may_have_it_again_within(state: StateDirectory) -> None:
    with engine_lock(state, "outer"):
        began = time.monotonic()
        with engine_lock(state, "inner"):
            pass
        assert time.monotonic() - began < 5
        assert state.engine_use() is not None, "the outer block has it still"
    assert state.engine_use() is None


def test_nothing_stays_behind_an_error_or_in_a_directory_that_is_gone(state: StateDirectory) -> None:
    with pytest.raises(RuntimeError, match="broken"), engine_lock(state, "run"):
        raise RuntimeError("broken")
    assert state.engine_use() is None
    with engine_lock(state, "run"):
        for left in sorted(state.path.rglob("*"), reverse=True):
            left.rmdir() if left.is_dir() else left.unlink()
        state.path.rmdir()
    assert not state.path.exists()
