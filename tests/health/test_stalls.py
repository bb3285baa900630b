"""A hanging stage is named and stopped: an engine, an environment, a trainer's process. Real HTTP, real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from roundhouse.activity import ACTIVITY, Stalled, supervised
from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError
from roundhouse.launch.subprocesses import ChildProcess
from roundhouse.stages.collect import collect_iteration
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse.training.service.job_entry import error_of
from tests.stages.scripted_engine import ScriptedEngine
from tests.stages.test_collect import engine  # noqa: F401 - a fixture

pytestmark = pytest.mark.real

T = TypeVar("T")
LIMIT = 1.0


@contextmanager
def hanging_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def open_test_run(tmp_path: Path, **environment: Any) -> tuple[Run, Reference]:
    tree = {
        "run_id": "r",
        "store": str(tmp_path / "store"),
        "rollout": {"prompts_per_iteration": 2, "group_size": 2, "concurrency": 2},
        **({"environment": environment} if environment else {}),
    }
    run = open_run(parse_config(tree))
    return run, run.begin(run.stage(1, "refit"), policy_version=0).commit()


def stall_of(work: Callable[[], T]) -> Stalled:
    begun = time.monotonic()
    with pytest.raises(Stalled) as raised:
        supervised(work, "collect", "iteration 1", LIMIT, grace=2.0)
    assert time.monotonic() - begun < 15
    assert isinstance(raised.value, InfraError), "so that the stage is tried again"
    assert ACTIVITY.wait_quiescent(10), ACTIVITY.summary()
    return raised.value


def test_a_hanging_engine_is_named_by_its_url_with_the_rollouts_that_wait_for_it(tmp_path: Path) -> None:
    run, weights = open_test_run(tmp_path)
    with hanging_server() as url:
        stall = stall_of(lambda: collect_iteration(run, 1, weights, url))
    assert f"engine: model call at {url}/v1/chat/completions" in str(stall)
    assert "collect: rollout" in str(stall)
    assert run.stage(1, "collect").reference() is None


def test_an_environment_that_blocks_is_named_by_the_line_where_it_stands(
    tmp_path: Path,
    engine: ScriptedEngine,  # noqa: F811
) -> None:
    run, weights = open_test_run(tmp_path, kind="custom", target="tests.gym.blocking_world:Hanging")
    stall = stall_of(lambda: collect_iteration(run, 1, weights, engine.url))
    assert "environment: call at hanging" in str(stall)
    assert re.search(r"environment: code at \S+blocking_world.py:\d+ in seed_session", str(stall))


def test_a_hanging_environment_server_is_named_and_a_new_attempt_finds_the_store_as_it_was(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"responses_create_params": {"input": [{"role": "user", "content": "hi"}]}}\n' * 2)
    with hanging_server() as url:
        run, weights = open_test_run(tmp_path, kind="remote", url=url, train_tasks=str(rows), heldout_tasks=str(rows))
        stall = stall_of(lambda: collect_iteration(run, 1, weights, "http://127.0.0.1:9"))
    assert f"environment: call at {url.removeprefix('http://')}" in str(stall)


def test_a_hanging_trainer_process_is_ended_with_its_attempt_and_one_that_speaks_is_left_alone(tmp_path: Path) -> None:
    hangs = step_process(tmp_path / "log", "import time; print('started', flush=True); time.sleep(600)")
    pids: list[int] = []

    def watch() -> None:
        while not pids:
            pids.extend(int(w.where.split()[1].rstrip(",")) for w in ACTIVITY.in_flight() if w.kind == "process")
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    stall = stall_of(lambda: hangs.run("train"))
    assert "train: process at pid" in str(stall)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    script = "import time\nfor k in range(12): print('update', k, flush=True); time.sleep(0.25)"
    speaks = step_process(tmp_path / "speaking", script)
    assert supervised(lambda: speaks.run("train"), "train", "iteration 1", 2 * LIMIT) == 0


def step_process(log: Path, script: str) -> ChildProcess:
    return ChildProcess("The training step", ["-c", script], log, 600, "train.service.timeout_seconds")


def test_a_trainer_process_that_the_kernel_killed_says_so(tmp_path: Path) -> None:
    error = error_of(-signal.SIGKILL, "The training step's process", "update 1 of 4")
    assert isinstance(error, InfraError)
    assert "If the kernel killed it since its memory was full, lower train.tokens_per_microbatch" in str(error)
