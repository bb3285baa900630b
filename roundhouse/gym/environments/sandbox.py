"""Untrusted Python in a locked process: one a call, with limits, and without files, network or other processes.

What holds (on Linux, x86_64 or aarch64; elsewhere nothing is run at all)
- The interpreter is isolated (`-I -S`), with an empty environment; nothing but stdin, stdout and stderr is open.
- Before untrusted code runs, the process filters its own system calls with seccomp, which cannot be undone: it can open no file
  and no socket, start no process or thread, and signal nobody. It needs no privileges and no container.
- CPU seconds, address space and bytes of output are limited by the kernel, and exceeding them is the code's fault. Wall time is
  limited by this side, which then kills the process group; since locked code cannot sleep, that is a machine with too little
  CPU to spare (or a deadlock), and an infrastructure failure. At most `concurrency` processes run at once, in threads of their
  own: the event loop never waits for one.
- The process is told inputs, never what is expected of them. Results are JSON texts and are compared here.
What does not: code sees its own interpreter (it may look at these inputs before it answers), and side channels are not closed.

    sandbox = Sandbox()
    await sandbox.call("def f(x): return x + 1", "f", [[1], [41]])   ->   ['2', '42']
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundhouse.errors import InfraError
from roundhouse.gym.environments.sandbox_child import NO_LOCK

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_CODE = 20_000
"""Characters of code that are run; longer code is refused."""


class SandboxUnavailable(InfraError):
    """This machine cannot lock a process in; nothing was run."""


class SandboxOverloaded(InfraError):
    """A process did not get the CPU time that it may use."""


class CodeFailed(Exception):
    """The code as a whole gave no results; the text says why: a name of an exception, `time`, `crash`, `output` or `length`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one process."""

    cpu_seconds: int = 2
    wall_seconds: float = 15.0
    memory_bytes: int = 256 * 2**20
    output_bytes: int = 64 * 2**10


class Sandbox:
    """Runs untrusted code, at most `concurrency` processes at once."""

    def __init__(self, concurrency: int = 4, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="sandbox")

    async def call(self, code: str, function: str, inputs: Sequence[Sequence[Any]]) -> list[str | None]:
        """What `function` of `code` returns for each input, as JSON text; None where it raised or returned something else.

        Raises:
            CodeFailed: the code does not define the function, or the process was ended by the kernel's limits.
            SandboxUnavailable, SandboxOverloaded
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.call_blocking, code, function, inputs)

    def call_blocking(self, code: str, function: str, inputs: Sequence[Sequence[Any]]) -> list[str | None]:
        """As `call`, in the caller's thread."""
        if len(code) > MAX_CODE:
            raise CodeFailed("length")
        limits = self._limits
        request = {
            "code": code,
            "function": function,
            "inputs": inputs,
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
        }
        status, output = _run(json.dumps(request).encode(), limits)
        if status == NO_LOCK:
            raise SandboxUnavailable(
                "The sandbox needs Linux on x86_64 or aarch64 with seccomp filters, which this machine refuses. Run the "
                "environment elsewhere: as a resources server on such a machine, reached by URL."
            )
        if status is None:
            raise SandboxOverloaded(
                f"A process was not done after {limits.wall_seconds:g} s of wall time, with {limits.cpu_seconds} s of CPU time "
                "to use: lower environment.concurrency or rollout.concurrency, or free the machine's cores."
            )
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            raise CodeFailed("time")
        return _results(output, len(inputs), limits.output_bytes)


def _run(request: bytes, limits: Limits) -> tuple[int | None, bytes]:
    """Exit status (a negative signal number when killed, None at the wall limit) and output of one process."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as asked:
        asked.write(request)
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            stdin=asked,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        status: int | None = None
        try:
            status = process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read(limits.output_bytes)


def _results(output: bytes, count: int, output_bytes: int) -> list[str | None]:
    """The code may have written anything to its output, such as JSON that is nested deeper than can be read."""
    try:
        told = json.loads(output)
        if isinstance(told, dict):
            raise CodeFailed(str(told.get("error", "crash"))[:100])
        if not isinstance(told, list) or len(told) != count:
            raise CodeFailed("crash")
        return [canonical(each["value"]) if isinstance(each, dict) and "value" in each else None for each in told]
    except (ValueError, RecursionError) as error:
        raise CodeFailed("output" if len(output) >= output_bytes else "crash") from error


def canonical(value: Any) -> str:
    """A value as JSON text: equal texts for equal values, and different ones for 1, 1.0 and true."""
    return json.dumps(value, sort_keys=True)
