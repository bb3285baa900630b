"""A sandbox on this machine: a process in separate namespaces, with its files in memory.

Invariant: the sandbox ends with this process and its lifetime; none of its data is on a disk. `local_child` describes
its access and the end of its processes. Commands run in threads, at most one per core. The thread that waits for a
command also sums the memory of its processes, ten times a second, because the limits inside are per process. A faster
growth is caught by the kernel, because processes of a sandbox have the highest `oom_score_adj`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from roundhouse.config.sandboxes import SandboxLimits
from roundhouse.environments.sandbox import LockedProcess, SandboxKilled, SandboxUnavailable
from roundhouse.environments.sandbox_child import LOCKED
from roundhouse.environments.sandboxes import VARIABLES, ExecutedSandbox, Execution

CHILD = Path(__file__).with_name("local_child.py")
GRACE_SECONDS = 15.0
"""After a limit of the inside, until this side takes the process for stuck."""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="sandbox")


class LocalProcess(ExecutedSandbox):
    """See the module."""

    def __init__(self, limits: SandboxLimits) -> None:
        super().__init__(limits)
        self._settings = limits
        self._process: LockedProcess | None = None

    async def start(self) -> None:
        self._process = await _in_thread(self._started)

    async def execute(self, arguments: Sequence[str], stdin: bytes, output_bytes: int) -> Execution:
        return await _in_thread(self._answer, arguments, stdin, output_bytes)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _in_thread(process.kill)

    def _started(self) -> LockedProcess:
        if sys.platform != "linux":
            raise _no_namespaces()
        limits = self._settings
        settings = {
            "memory_bytes": limits.memory_mib * 2**20,
            "disk_bytes": limits.disk_mib * 2**20,
            "directories": limits.directories,
            "processes": limits.processes,
            "lifetime_seconds": limits.lifetime_seconds,
            "variables": VARIABLES | {"PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"},
        }
        deadline = time.monotonic() + GRACE_SECONDS
        process = LockedProcess(CHILD, subprocess.PIPE)
        try:
            process.write(json.dumps(settings).encode() + b"\n", deadline)
            if process.read(len(LOCKED), deadline) != LOCKED:
                raise _no_namespaces()
            return process
        except BaseException:
            process.kill()
            raise

    def _answer(self, arguments: Sequence[str], stdin: bytes, output_bytes: int) -> Execution:
        process = self._process
        if process is None:
            raise SandboxKilled("The sandbox was closed while a command was waiting to run.")
        request = {
            "arguments": list(arguments),
            "stdin": base64.b64encode(stdin).decode(),
            "seconds": self.limits.command_seconds,
            "output_bytes": output_bytes,
        }
        deadline = time.monotonic() + self.limits.command_seconds + GRACE_SECONDS
        process.write(json.dumps(request).encode() + b"\n", deadline)
        memory = MemoryWatch(process.pid, self._settings.memory_mib)
        line = process.read_line(deadline, memory.look)
        if not line:
            raise SandboxKilled(
                f"The sandbox ended before its command did: its lifetime of {self.limits.lifetime_seconds:g} s "
                "(environment.sandbox.lifetime_seconds) is over, or something outside ended it, such as the kernel for want of "
                "memory."
            )
        answer: dict[str, Any] = json.loads(line)
        return Execution(**answer | {"output": base64.b64decode(answer["output"]) + memory.note()})


class MemoryWatch:
    """End the commands of a sandbox if its processes together exceed its memory."""

    def __init__(self, sandbox: int, memory_mib: int) -> None:
        """`sandbox` is the process that stands for the sandbox; its one child starts the commands."""
        self._sandbox = sandbox
        self._memory_mib = memory_mib
        self._has_killed = False

    def look(self) -> None:
        """Kill all commands if their sum is beyond the limit."""
        commands = _descendants(self._sandbox)[1:]
        if (
            sum(map(_resident_bytes, commands)) <= self._memory_mib << 20
        ):  # at least the sum: shared pages count for each
            return
        if sum(map(_proportional_bytes, commands)) > self._memory_mib << 20:
            self._has_killed = True
            for pid in commands:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def note(self) -> bytes:
        """The reason for the policy, if commands were killed."""
        text = f"\nkilled: the sandbox held more than {self._memory_mib} MiB of memory\n"
        return text.encode() if self._has_killed else b""


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process, each after its parent."""
    processes: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                for child in map(int, children):
                    processes += [child, *_descendants(child)]
    return processes


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional_bytes(pid: int) -> int:
    """The memory of a process, a page that several share by its part; all of it if the kernel does not report parts."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return _resident_bytes(pid)


async def _in_thread(function: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads(), function, *arguments)


def _no_namespaces() -> SandboxUnavailable:
    return SandboxUnavailable(
        "environment.sandbox.kind is local, which needs Linux on x86_64 or aarch64, seccomp filters, and user namespaces (see "
        "that `unshare -Urmpn true` works) or root with the right to mount. This machine has not all of them: set "
        "environment.sandbox.kind to container or kubernetes."
    )
