"""A launcher with two machines that share only a bucket: each is a mount namespace with a separate /tmp.

`python -m tests.launch.machines <fields of Machine as JSON>` is such a machine, and runs a program's ranks as Ray's actor
does.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from pydantic import BaseModel

from roundhouse.errors import InfraError, RoundhouseError
from roundhouse.launch.base import GroupMember, Launcher, Program, Say, Stopped
from roundhouse.launch.ray_actors import PlacedSpec
from roundhouse.launch.subprocesses import SubprocessLauncher
from roundhouse.store.location import Location
from roundhouse.training.service.job_entry import exit_code, read_error
from tests.ports import free_port

MACHINES = 2
CLONE_NEWNS = 0x00020000


class Machine(BaseModel):
    machine: int
    port: int
    module: str
    place: str
    ranks: int
    stays: bool


class TwoMachines(Launcher):
    """Half of the ranks on each."""

    def run(self, program: Program, said: Say, stopped: threading.Event) -> Location:
        program.prepare()
        port, ended = free_port(), threading.Event()
        machines = []
        for number in range(MACHINES):
            machine = Machine(
                machine=number,
                port=port,
                module=program.module,
                place=program.place.uri,
                ranks=program.ranks,
                stays=program.stays,
            )
            command = [sys.executable, "-m", "tests.launch.machines", machine.model_dump_json()]
            machines.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

        def hear(process: subprocess.Popen[str]) -> None:
            assert process.stdout is not None
            for line in process.stdout:
                said(line.rstrip("\n"))
            ended.set()

        heard = [threading.Thread(target=hear, args=(process,), daemon=True) for process in machines]
        for thread in heard:
            thread.start()
        try:
            while not ended.wait(0.1):
                if stopped.is_set():
                    raise Stopped
        finally:
            for process in machines:
                if stopped.is_set():
                    assert process.stdin is not None
                    process.stdin.close()
                process.wait(60)
        if any(process.returncode for process in machines):
            raise read_error(program.place) or InfraError("a machine failed")
        return program.place


def have_own_files() -> None:
    """Separate /tmp from that of the other machine and of the parent process."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise PermissionError("a mount namespace needs CAP_SYS_ADMIN")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/tmp"], check=True)
    Path(tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)  # of TMPDIR, which may be in there


def main() -> int:
    have_own_files()
    machine = Machine.model_validate_json(sys.argv[1])
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    program = Program(
        what=f"machine {machine.machine}",
        module=machine.module,
        spec=PlacedSpec(),
        place=Location(machine.place),
        place_field="place",
        stage="train",
        timeout_seconds=600.0,
        timeout_key="a.key",
        ranks=machine.ranks,
        group=GroupMember(MACHINES, machine.machine, "127.0.0.1", machine.port),
        stays=machine.stays,
    )
    launcher = SubprocessLauncher(None)
    try:
        launcher.run_prepared(program, lambda line: print(line, flush=True), stopped)
    except Stopped:
        return 0
    except RoundhouseError as error:
        print(error, flush=True)
        return exit_code(error)
    finally:
        launcher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
