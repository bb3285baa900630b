"""A sandbox on this machine: a process in namespaces of its own, with its files in memory.

Invariant: the sandbox lives no longer than this process and its lifetime; nothing of it is on a disk. What it can reach, and
what becomes of what a command starts, is at the top of `local_child`. Commands run in threads, no more at once than there are
cores.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
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
        line = process.read_line(deadline)
        if not line:
            raise SandboxKilled(
                f"The sandbox ended before its command did: its lifetime of {self.limits.lifetime_seconds:g} s "
                "(environment.sandbox.lifetime_seconds) is over, or something outside ended it, such as the kernel for want of "
                "memory."
            )
        answer: dict[str, Any] = json.loads(line)
        return Execution(**answer | {"output": base64.b64decode(answer["output"])})


async def _in_thread(function: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads(), function, *arguments)


def _no_namespaces() -> SandboxUnavailable:
    return SandboxUnavailable(
        "environment.sandbox.kind is local, which needs Linux on x86_64 or aarch64, seccomp filters, and user namespaces (see "
        "that `unshare -Urmpn true` works) or root with the right to mount. This machine has not all of them: set "
        "environment.sandbox.kind to container or kubernetes."
    )
