"""A process that does one piece of work for this one.

Invariant: it ends before `run` returns, within its time limit, and not later than the process that started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse.activity import ACTIVITY
from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.training.service.job_entry import error_of

_LAST_LINES = 12
POLL_SECONDS = 0.5
"""How often the process's log is looked at for a sign of life."""
ENDING_SECONDS = 5.0
"""For a process that was told to end to write down what it has."""

Said = Callable[[str], None]
"""Told each line of the log, once and in order."""


class Stopped(Exception):
    """The process was ended because its result is not wanted any more."""


@dataclass(frozen=True)
class ChildProcess:
    """What to start, and how long to wait."""

    what: str
    """For a person: `The training step`."""
    arguments: Sequence[str]
    """Of this interpreter."""
    log: Path
    timeout_seconds: float
    timeout_key: str
    """Of the configuration, to raise when it takes longer."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More than it inherits."""

    def run(self, module: str, said: Said | None = None, stopped: threading.Event | None = None) -> int:
        """The process's exit code. Each time it says something, it has moved.

        Args:
            module: whose activity it is.
            stopped: once set, the process is told to end, and ended.

        Raises:
            InfraError: it took too long.
            Stopped: it was told to end.
        """
        command = [
            sys.executable,
            "-m",
            "roundhouse.infra.die_with_parent",
            str(os.getpid()),
            sys.executable,
            *self.arguments,
        ]
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with ACTIVITY.track(module, "process", where=f"pid {process.pid}, log {self.log}"):
                    return self._wait(process, said, stopped)
            finally:
                _end(process)

    def error_of(self, code: int) -> RoundhouseError:
        """What an exit code says, with the end of the log."""
        return error_of(code, f"{self.what}'s process", self._last_lines())

    def _wait(self, process: subprocess.Popen[bytes], said: Said | None, stopped: threading.Event | None) -> int:
        deadline = time.monotonic() + self.timeout_seconds
        with self.log.open("rb") as log:
            rest = b""
            while True:
                try:
                    code = process.wait(max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    code = None
                if told := log.read():
                    ACTIVITY.advance()
                    *lines, rest = (rest + told).split(b"\n")
                    if said is not None:
                        for line in lines:
                            said(line.decode(errors="replace"))
                if code is not None:
                    return code
                if stopped is not None and stopped.is_set():
                    raise Stopped
                if time.monotonic() >= deadline:
                    raise InfraError(
                        f"{self.what} took longer than {self.timeout_key} ({self.timeout_seconds:.0f} s) and was ended. Raise "
                        f"it. The last it said: {self._last_lines()}"
                    )

    def _last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then end it and all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
