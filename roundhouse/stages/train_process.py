"""Start a training step as a process of its own, and bring back what it leaves.

Invariant: the process ends before this returns, within the time limit, and not later than the process that started it. What it
says by its error file or its exit code is raised here as the error that it was there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from roundhouse.config.train_service import ProcessService
from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.health.activity import ACTIVITY
from roundhouse.store.location import Location
from roundhouse.training.service.exit_codes import EXIT_CODES
from roundhouse.training.service.one_shot import StepResult, StepSpec, read_error, read_result

MODULE = "roundhouse.training.service.one_shot"
_LAST_LINES = 12
POLL_SECONDS = 1.0
"""How often the process's log is looked at for a sign of life."""


def run_in_process(spec: StepSpec, service: ProcessService) -> tuple[StepResult, pa.Table]:
    """Run the step, over torchrun when it has several processes; `spec.report` is set to a directory of its own.

    Raises:
        DataError, ConfigError, StoreError: as the step raised them.
        InfraError: the process was killed, ran out of time, or failed by the machine.
    """
    with tempfile.TemporaryDirectory(prefix="roundhouse-step-") as directory:
        scratch = Path(directory)
        report = Location((scratch / "report").as_uri())
        (scratch / "spec.json").write_text(spec.model_copy(update={"report": report.uri}).model_dump_json())
        code = _run(_command(scratch / "spec.json", service.processes), scratch / "log", service.timeout_seconds)
        if code != 0:
            raise read_error(report) or _error_of(code, scratch / "log")
        return read_result(report)


def _command(spec: Path, processes: int) -> list[str]:
    step = ["-m", MODULE, "--spec", str(spec)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    leash = [sys.executable, "-m", "roundhouse.infra.leash", str(os.getpid())]
    return [*leash, sys.executable, *(torchrun if processes > 1 else []), *step]


def _run(command: list[str], log: Path, timeout_seconds: float) -> int:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with ACTIVITY.track("train", "process", where=f"pid {process.pid}, log {log}"):
                return _wait(process, log, timeout_seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path, timeout_seconds: float) -> int:
    """The process's exit code. Each time it says something, it has moved."""
    deadline = time.monotonic() + timeout_seconds
    said = 0
    while True:
        try:
            return process.wait(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired as error:
            if (size := log.stat().st_size) != said:
                said = size
                ACTIVITY.advance()
            if time.monotonic() >= deadline:
                raise InfraError(
                    f"The training step took longer than train.service.timeout_seconds ({timeout_seconds:.0f} s) and was "
                    f"ended. Raise it. The last it said: {_last_lines(log)}"
                ) from error


def _error_of(code: int, log: Path) -> RoundhouseError:
    kind = next((kind for kind, known in EXIT_CODES.items() if known == code), InfraError)
    memory = " (by the kernel, when its memory was full?)" if code == -signal.SIGKILL else ""
    ended = f"was killed by signal {-code}{memory}" if code < 0 else f"ended with exit code {code}"
    return kind(f"The training step's process {ended}. The last it said: {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
