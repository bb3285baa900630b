"""Programs as processes of this machine.

Invariant: a program ends before `run` returns, within its time limit, and not later than the process that started it: the
kernel ends it with its parent, and all that it has started carries its mark. Ranks are torchrun's, and listen on loopback only.
Its CPU seconds are the system's (`roundhouse.cpu.ProgramCpu`), however it ends.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from roundhouse.activity import ACTIVITY
from roundhouse.cpu import ProgramCpu
from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.infra import processes
from roundhouse.launch.base import Launcher, Program, Say, Stopped
from roundhouse.store.location import Location
from roundhouse.store.process_identity import boot_id
from roundhouse.store.run import Run
from roundhouse.training.service.job_entry import (
    RANKS_MEET_BY_FILE,
    SAFE_PATH,
    SPEC,
    error_of,
    read_error,
    torchrun,
    torchrun_of_machine,
)

_LAST_LINES = 12
_FAILED_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
"""In torchrun's report."""
POLL_SECONDS = 0.5
"""Interval at which the process's log is checked for progress."""
_TREE_SECONDS = 0.5
_REAP_SECONDS = 0.05
ENDING_SECONDS = 5.0
"""Grace period in which an ending process stores its results."""


class SubprocessLauncher(Launcher):
    """A process for each program, or torchrun over its ranks."""

    same_machine = True
    ending_seconds = ENDING_SECONDS + 2.0

    def __init__(self, run: Run | None) -> None:
        sweep_scratch()
        self._scratch = tempfile.TemporaryDirectory(prefix=_prefix(), ignore_cleanup_errors=True)
        self._lock = os.open(self._scratch.name, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without such locks, on which nobody can take one to delete it
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        program.prepare()
        return self.run_prepared(program, said, stopped)

    def run_prepared(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        """Run a program. Its spec is already at its place."""
        scratch = Path(tempfile.mkdtemp(dir=self._scratch.name))
        environment, ranks = dict(program.environment), list[str]()
        if program.ranks > 1 or program.group is not None:
            environment = SAFE_PATH | environment
        if program.group is not None:
            group = program.group
            ranks = torchrun_of_machine(group.machine, group.machines, program.ranks, group.address, group.port)
        elif program.ranks > 1:
            ranks, environment = torchrun(program.ranks, str(scratch / "meeting")), RANKS_MEET_BY_FILE | environment
        if program.stays:  # a signal ends it, and its files are deleted with the launcher
            environment = {"TMPDIR": str(scratch)} | environment
        spec = f"{program.place.uri}/{SPEC}"
        process = ChildProcess(
            program.what,
            [*ranks, "-m", program.module, "--spec", spec],
            scratch / f"{program.label or program.stage}.log",
            program.timeout_seconds,
            program.timeout_key,
            environment,
        )
        if (code := process.run(program.stage, said, stopped, program.stage_uri)) != 0:
            raise (
                _error_of_ranks(process, program, code)
                if ranks
                else read_error(program.place) or process.error_of(code)
            )
        return program.place

    def close(self) -> None:
        self._scratch.cleanup()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def sweep_scratch() -> None:
    """Delete files of killed processes' launchers on this machine, such as downloaded checkpoints. Each launcher holds
    a lock on its directory, which ends with its process."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with suppress(OSError):  # another's, or gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if time.time() - path.stat().st_mtime > _NEW_SECONDS:  # it may not be locked yet
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _prefix() -> str:
    """Return the name prefix of this machine's directories since its boot: machines that share a disk do not share
    locks."""
    return f"roundhouse-launch-{boot_id()[:8]}-"


_NEW_SECONDS = 60.0


def _error_of_ranks(process: ChildProcess, program: Program, code: int) -> RoundhouseError:
    """Return the cause if several ranks failed: a killed one leaves no error, and the others report the loss of a
    peer."""
    error = read_error(program.place)
    if error is not None and not isinstance(error, InfraError):
        return error  # nothing that a peer's end causes
    failed = [(int(rank), int(ended)) for rank, ended in _FAILED_RANK.findall(process.log.read_text(errors="replace"))]
    killed = [
        each for each in failed if each[1] < 0 and each[1] != -signal.SIGTERM
    ]  # with which torchrun ends the others
    if not failed or (error is not None and not killed):
        return error or process.error_of(code)
    rank, ended = (killed or failed)[-1]  # torchrun's first one is the last in its report
    of = f"rank {rank} of {program.ranks * (1 if program.group is None else program.group.machines)}"
    if ended >= 0:
        return error_of(ended, of, process.last_lines())
    return error_of(ended, of, process.last_lines() if error is None else f"another rank then reported: {error}")


@dataclass(frozen=True)
class ChildProcess:
    """A process to start, and its time limit."""

    what: str
    """For a person: `The training step`."""
    arguments: Sequence[str]
    """Arguments of this interpreter."""
    log: Path
    timeout_seconds: float
    timeout_key: str
    """Configuration key of the time limit, for the error."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More than it inherits."""

    def run(
        self,
        module: str,
        said: Say | None = None,
        stopped: threading.Event | None = None,
        stage_uri: str = "",
    ) -> int:
        """Run the process and return its exit code. Each output line counts as progress.

        Args:
            module: module of the activity.
            said: receives each line of the log, once and in order.
            stopped: once set, the process is asked to end, and then killed.
            stage_uri: stage that is charged its CPU seconds; the next one of `module` if it serves several.

        Raises:
            InfraError: it took too long.
            Stopped: it was asked to end.
        """
        parent = ["-m", "roundhouse.die_with_parent", str(os.getpid())]
        mark = f"program-{uuid.uuid4().hex}"
        with self.log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", *parent, sys.executable, "-P", *self.arguments],
                env=os.environ | self.environment | {processes.MARK: mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            cpu = ProgramCpu(stage_uri or module, _reader(psutil.Process(process.pid)))
            used, is_lost = 0.0, True
            try:
                with ACTIVITY.track(module, "process", where=f"pid {process.pid}, log {self.log}"):
                    code, used = self._wait(process, said, stopped)
                is_lost = code != 0
                return code
            except Stopped:
                is_lost = False
                raise
            finally:
                cpu.end(used + _end(process, mark), is_lost=is_lost)

    def error_of(self, code: int) -> RoundhouseError:
        """Make the error of an exit code, with the end of the log."""
        return error_of(code, f"{self.what}'s process", self.last_lines())

    def _wait(
        self, process: subprocess.Popen[bytes], said: Callable[[str], None] | None, stopped: threading.Event | None
    ) -> tuple[int, float]:
        """Exit code and CPU seconds."""
        deadline = time.monotonic() + self.timeout_seconds
        with self.log.open("rb") as log:
            rest = b""
            while True:
                ended = _reap(process, max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
                if text := log.read():
                    ACTIVITY.advance()
                    *lines, rest = (rest + text).split(b"\n")
                    if said is not None:
                        for line in lines:
                            said(line.decode(errors="replace"))
                if ended is not None:
                    return ended
                if stopped is not None and stopped.is_set():
                    raise Stopped
                if time.monotonic() >= deadline:
                    raise InfraError(
                        f"{self.what} took longer than {self.timeout_key} ({self.timeout_seconds:.0f} s) and was stopped. "
                        f"Raise it. Last output: {self.last_lines()}"
                    )

    def last_lines(self) -> str:
        """The end of its log."""
        return processes.end_of_log(self.log, _LAST_LINES)


def _reap(process: subprocess.Popen[bytes], seconds: float) -> tuple[int, float] | None:
    """The exit code of a child and the CPU seconds of it and of all that it has waited for; None if it still runs."""
    deadline = time.monotonic() + seconds
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        if (left := deadline - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, _REAP_SECONDS))


def _end(process: subprocess.Popen[bytes], mark: str) -> float:
    """End a running child and all processes with its mark, and return the CPU seconds of those ended here."""
    deadline, used = time.monotonic() + ENDING_SECONDS, 0.0
    if process.returncode is None:
        process.terminate()
        if (ended := _reap(process, ENDING_SECONDS)) is None:
            process.kill()
            ended = _reap(process, processes.KILL_SECONDS)
        used = 0.0 if ended is None else ended[1]
    # processes that it had not waited for, such as ranks of a killed torchrun
    used += _seconds_of(processes.carrying(mark))
    left = max(0.0, deadline - time.monotonic())
    processes.end(lambda: processes.carrying(mark), grace_seconds=left)
    return used


def _reader(leader: psutil.Process) -> Callable[[], float]:
    """Return a reader of the CPU seconds of a process and its descendants. It is called ten times a second; the
    descendants are listed more rarely, because that scans all processes of the machine."""
    members, looked = list[psutil.Process](), -math.inf

    def read() -> float:
        nonlocal members, looked
        if (now := time.monotonic()) - looked > _TREE_SECONDS:
            looked = now
            try:  # parents first: a process that ends in between is missing, and never counted twice
                members = [leader, *leader.children(recursive=True)]
            except psutil.NoSuchProcess:
                members = []
        return _seconds_of(members)

    return read


def _seconds_of(found: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of living processes and of the children they have waited for."""
    used = 0.0
    for process in found:
        try:
            used += sum(process.cpu_times()[:4])  # user and system, then those of children that have ended
        except psutil.Error:
            continue
    return used
