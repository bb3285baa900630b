"""Processes that are born with everything imported: forks of one process that has imported and done nothing else.

Invariant: a child is a process of its own, whose state ends with it; it shares with its siblings only what importing makes.
Chaos starts the same commands hundreds of times, and nine tenths of a start are imports.

    nursery = Nursery(log, environment)
    child = nursery.start("roundhouse.cli", ["train", "run.yaml"], log, environment)     # like subprocess.Popen
    child.kill(); child.wait()
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUN = (
    "flows.train",
    "flows._prefect.delivery",
    "mlflow.tracking",
    "roundhouse.cli",
    "roundhouse.console",
    "roundhouse.generation.standalone",
    "roundhouse.generation.transformers_engine",
    "roundhouse.compat.nemo_gym.servers.resources",
    "roundhouse.compat.nemo_gym.clients.resources",
    "roundhouse.training.trainer",
    "roundhouse.training.service.verbs",
    "transformers.models.qwen3.modeling_qwen3",
    "s3fs",
)
"""What a run imports, its servers and its trainer included."""


class Child:
    """A child of the nursery, as `subprocess.Popen` has it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.05)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process that forks; it ends with whoever started it."""

    def __init__(self, log: Path, environment: dict[str, str], imports: Sequence[str] = RUN) -> None:
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.nursery", *imports],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        self._lock = threading.Lock()

    def start(self, module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> Child:
        """Run `main()` of a module as the program that it is."""
        order = {"module": module, "arguments": arguments, "log": str(log), "environment": environment}
        return Child(self, int(self.ask({"start": order})))

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the nursery has ended with {self._process.wait()}; see its log")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    """Import, then fork on demand: a line of JSON for each order and each answer."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        order = json.loads(line)
        answer = _start(order["start"]) if "start" in order else _poll(order["poll"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _start(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _be(order)
        finally:
            os._exit(code)
    return pid


def _be(order: dict[str, Any]) -> int:
    """In the child: the program."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])
    random.seed()
    sys.argv = [order["module"], *order["arguments"]]
    try:
        module = importlib.import_module(order["module"])
        if hasattr(module, "main"):
            ended = module.main()
            return ended if isinstance(ended, int) else 0
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        logging.exception("%s has failed", order["module"])
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _poll(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return None if ended == 0 else os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
