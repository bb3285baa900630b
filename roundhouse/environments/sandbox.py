"""Untrusted Python in a locked process: one a call, with limits, and without files, network or other processes.

What holds (on Linux, x86_64 or aarch64; elsewhere nothing is run at all)
- The interpreter is isolated (`-I -S`), with an empty environment; nothing but stdin, stdout and stderr is open.
- Before untrusted code runs, the process filters its own system calls with seccomp, which cannot be undone: it can open no file
  and no socket, start no process or thread, send no signal, and wait for nothing. It needs no privileges and no container.
- CPU seconds, address space and bytes of output are limited, and exceeding them is the code's fault. At most `concurrency`
  processes run at once, in threads of their own: the event loop never waits for one.
- The process is given inputs, never the expected results. Results are JSON texts and are compared here.
- The code does not decide how it is counted. Request and answer are in memory, never on a disk. A failure of this machine is
  only what this side sees itself: the process ended before it said `LOCKED`; or it is not done at the wall limit, though locked
  code computes or ends (it got too little CPU, or was stopped); or a signal ended it that its own limits do not send (the
  kernel's, for want of memory). Everything else, any exit status after `LOCKED` too, is the code's.
What does not: code sees its own interpreter (it may look at these inputs before it answers), and side channels are not closed.

    sandbox = LockedPython()
    await python.call("def f(x): return x + 1", "f", [[1], [41]])   ->   ['2', '42']
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundhouse.environments.sandbox_child import LOCKED, NO_LOCK
from roundhouse.errors import InfraError

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_CODE = 20_000
"""Characters of code that are run; longer code is refused."""


FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that locked code cannot send to itself."""


class SandboxUnavailable(InfraError):
    """This machine cannot start a process or lock it in; nothing was run."""


class SandboxOverloaded(InfraError):
    """A process did not get the CPU time that it may use."""


class SandboxKilled(InfraError):
    """Something outside of the sandbox ended a process, such as the kernel for want of memory."""


class CodeFailed(Exception):
    """The code as a whole gave no results; the text says why: a name of an exception, `time`, `crash`, `output` or `length`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one process."""

    cpu_seconds: int = 2
    wall_seconds: float = 15.0
    memory_bytes: int = 256 * 2**20
    output_bytes: int = 64 * 2**10


class LockedPython:
    """Runs untrusted code, at most `concurrency` processes at once, and no more than there are cores.

    The processes only compute. Were there many more than cores, code that never ends would keep the others, and itself, from
    their CPU time until the wall limit, and so count as a failure of the machine.
    """

    def __init__(self, concurrency: int = 4, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._threads = ThreadPoolExecutor(min(concurrency, os.cpu_count() or 1), thread_name_prefix="sandbox")

    async def call(self, code: str, function: str, inputs: Sequence[Sequence[Any]]) -> list[str | None]:
        """What `function` of `code` returns for each input, as JSON text; None where it raised or returned something else.

        Raises:
            CodeFailed: the code does not define the function, or it reached a limit, or it answered nothing of use.
            SandboxUnavailable, SandboxOverloaded, SandboxKilled
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
        deadline = time.monotonic() + limits.wall_seconds
        with _memory_file(json.dumps(request).encode()) as asked, LockedProcess(CHILD, asked) as process:
            said = process.read(len(LOCKED) + limits.output_bytes, deadline)
            if len(said) == len(LOCKED) + limits.output_bytes:
                raise CodeFailed("output")
            status, cpu_seconds = process.wait(deadline)
        if not said:
            raise not_locked(status)
        if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
            raise CodeFailed("time")
        if -status in FROM_OUTSIDE:
            raise killed(status)
        # The code may have written anything to its output, such as JSON that is nested deeper than can be read
        output = said.removeprefix(LOCKED)
        count = len(inputs)
        try:
            told = json.loads(output)
            if isinstance(told, dict):
                raise CodeFailed(str(told.get("error", "crash"))[:100])
            if not isinstance(told, list) or len(told) != count:
                raise CodeFailed("crash")
            return [canonical(each["value"]) if isinstance(each, dict) and "value" in each else None for each in told]
        except (ValueError, RecursionError) as error:
            raise CodeFailed("crash") from error


class LockedProcess:
    """A script of this directory as a process that says `LOCKED` before anything untrusted runs in it; killed on exit.

    Raises:
        SandboxUnavailable: it cannot be started.
    """

    def __init__(self, script: Path, stdin: int) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxUnavailable(f"A process of the sandbox cannot be started: {error}.") from error
        assert self._process.stdout is not None
        self._said = self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._said, select.POLLIN)

    def __enter__(self) -> LockedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def write(self, data: bytes, deadline: float) -> None:
        """Write to its stdin, a pipe, unless it has ended.

        Raises:
            SandboxOverloaded: it does not read all of it by the deadline.
        """
        assert self._process.stdin is not None
        place = self._process.stdin.fileno()
        os.set_blocking(place, False)
        free = select.poll()
        free.register(place, select.POLLOUT)
        with contextlib.suppress(BrokenPipeError):
            while data:
                if not free.poll(_milliseconds_until(deadline)):
                    raise _overloaded()
                data = data[os.write(place, data) :]

    def read(self, size: int, deadline: float) -> bytes:
        """That many bytes of what it says; fewer when it says no more.

        Raises:
            SandboxOverloaded: neither by the deadline.
        """
        found = bytearray()
        while len(found) < size:
            if not self._poll.poll(_milliseconds_until(deadline)):
                raise _overloaded()
            more = os.read(self._said, size - len(found))
            if not more:
                break
            found += more
        return bytes(found)

    def read_line(self, deadline: float) -> bytes:
        """The one line that it says next; nothing when it has ended.

        Raises:
            SandboxOverloaded: not by the deadline.
        """
        found = bytearray()
        while not found.endswith(b"\n"):
            if not self._poll.poll(_milliseconds_until(deadline)):
                raise _overloaded()
            more = os.read(self._said, 2**20)
            if not more:
                return b""
            found += more
        return bytes(found)

    def wait(self, deadline: float) -> tuple[int, float]:
        """Exit status (a negative signal number when killed) and seconds of CPU time of the process, once it has ended.

        Raises:
            SandboxOverloaded: it has not by the deadline.
        """
        while True:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                return self._process.returncode, used.ru_utime + used.ru_stime
            if time.monotonic() > deadline:
                raise _overloaded()
            time.sleep(0.001)


def not_locked(status: int) -> InfraError:
    """Why a process ended that never said `LOCKED`: nothing untrusted has run in it, so its exit status is ours."""
    if status == NO_LOCK:
        return SandboxUnavailable(
            "The sandbox needs Linux on x86_64 or aarch64 with seccomp filters, which this machine refuses. Run the "
            "environment elsewhere: as a resources server on such a machine, reached by URL."
        )
    if status < 0:
        return killed(status)
    return SandboxUnavailable(
        f"The interpreter {sys.executable} ended with status {status} before it ran anything. See that "
        f"`{sys.executable} -I -S -c 'import ctypes'` works on this machine."
    )


def killed(status: int) -> SandboxKilled:
    return SandboxKilled(
        f"{signal.Signals(-status).name} from outside ended a process of the sandbox. Often it is the kernel for want of "
        "memory: give the machine or pod room for environment.concurrency times 256 MiB."
    )


def _milliseconds_until(deadline: float) -> float:
    return max(0.0, 1000 * (deadline - time.monotonic()))


def _overloaded() -> SandboxOverloaded:
    return SandboxOverloaded(
        "A process was not done at its wall limit, with CPU time left to use: lower environment.concurrency or "
        "rollout.concurrency, or free the machine's cores."
    )


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    """A descriptor that reads `content`, which is on no disk.

    Raises:
        SandboxUnavailable
    """
    if sys.platform != "linux":
        raise not_locked(NO_LOCK)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(os.memfd_create("request"), "w+b", buffering=0))
            file.write(content)
            file.seek(0)
        except OSError as error:
            raise SandboxUnavailable(f"A request to the sandbox cannot be written to memory: {error}.") from error
        yield file.fileno()


def canonical(value: Any) -> str:
    """A value as JSON text: equal texts for equal values, and different ones for 1, 1.0 and true."""
    return json.dumps(value, sort_keys=True)
