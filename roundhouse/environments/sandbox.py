"""Untrusted Python in a locked process: one per call, with limits, and without files, network or other processes.

Guarantees (on Linux, x86_64 or aarch64; elsewhere nothing is run)
- The interpreter is isolated (`-I -S`), with an empty environment; only stdin, stdout and stderr are open.
- Before untrusted code runs, the process filters its own system calls with seccomp, irrevocably: it cannot open a file
  or a
  socket, start a process or thread, send a signal, or wait. It needs no privileges and no container.
- CPU seconds, address space and bytes of output are limited, and exceeding them is the code's fault. At most
  `concurrency`
  processes run at once, in separate threads: the event loop never waits for one.
- The process receives inputs, never the expected results. Results are JSON texts and are compared here.
- The code cannot influence its classification. Request and answer are in memory, never on a disk. A failure of this
  machine is
  only what this side observes: the process ended before it wrote `LOCKED`; or it is not done at the wall limit,
      although locked
  code computes or ends (it got too little CPU, or was stopped); or it got a signal that its limits do not send (the
  kernel's,
  for lack of memory). Everything else, including any exit status after `LOCKED`, is the code's.
Not guaranteed: code sees its own interpreter (it may inspect these inputs before it answers), and side channels are
open.

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundhouse.environments.sandbox_child import LOCKED, NO_LOCK
from roundhouse.errors import InfraError

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_CODE = 20_000
"""Characters of code that are run; longer code is refused."""


WATCH_SECONDS = 0.1
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that locked code cannot send to itself."""


class SandboxUnavailable(InfraError):
    """This machine cannot start a process or lock it in; nothing was run."""


class SandboxOverloaded(InfraError):
    """A process did not get the CPU time that it may use."""


class SandboxKilled(InfraError):
    """Something outside of the sandbox ended a process, such as the kernel for want of memory."""


class CodeFailed(Exception):
    """The code gave no results; the text is the cause: a name of an exception, `time`, `crash`, `output` or `length`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process."""

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
        """Return the result of `function` of `code` for each input, as JSON text; None for an exception or another
        type.

        Raises:
            CodeFailed: the code does not define the function, reached a limit, or gave a useless answer.
            SandboxUnavailable, SandboxOverloaded, SandboxKilled
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.call_blocking, code, function, inputs)

    def call_blocking(self, code: str, function: str, inputs: Sequence[Sequence[Any]]) -> list[str | None]:
        """Call as `call` does, in the caller's thread."""
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
        with _memory_file(json.dumps(request).encode()) as request_file, LockedProcess(CHILD, request_file) as process:
            output_bytes = process.read(len(LOCKED) + limits.output_bytes, deadline)
            if len(output_bytes) == len(LOCKED) + limits.output_bytes:
                raise CodeFailed("output")
            status, cpu_seconds = process.wait(deadline)
        if not output_bytes:
            raise not_locked(status)
        if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu_seconds >= limits.cpu_seconds):
            raise CodeFailed("time")
        if -status in FROM_OUTSIDE:
            raise killed(status)
        # The code may have written anything to its output, such as JSON that is nested deeper than can be read
        output = output_bytes.removeprefix(LOCKED)
        count = len(inputs)
        try:
            answer = json.loads(output)
            if isinstance(answer, dict):
                raise CodeFailed(str(answer.get("error", "crash"))[:100])
            if not isinstance(answer, list) or len(answer) != count:
                raise CodeFailed("crash")
            return [canonical(each["value"]) if isinstance(each, dict) and "value" in each else None for each in answer]
        except (ValueError, RecursionError) as error:
            raise CodeFailed("crash") from error


class LockedProcess:
    """A script as a process that writes `LOCKED` before untrusted code runs in it; killed on exit.

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
        # The kernel ends a sandbox's processes first when memory runs out. Their children inherit this
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")
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
        """Return that many bytes of its output; fewer at its end.

        Raises:
            SandboxOverloaded: neither by the deadline.
        """
        content = bytearray()
        while len(content) < size:
            if not self._poll.poll(_milliseconds_until(deadline)):
                raise _overloaded()
            more = os.read(self._said, size - len(content))
            if not more:
                break
            content += more
        return bytes(content)

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_line(self, deadline: float, watch: Callable[[], None] | None = None) -> bytes:
        """Return the next line of its output; empty at its end.

        Args:
            watch: called every `WATCH_SECONDS` until then.

        Raises:
            SandboxOverloaded: not by the deadline.
        """
        content = bytearray()
        while not content.endswith(b"\n"):
            remaining = _milliseconds_until(deadline)
            if not self._poll.poll(remaining if watch is None else min(remaining, 1000 * WATCH_SECONDS)):
                if watch is not None and remaining > 0:
                    watch()
                    continue
                raise _overloaded()
            more = os.read(self._said, 2**20)
            if not more:
                return b""
            content += more
        return bytes(content)

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
    """Return the reason why a process ended without `LOCKED`: no untrusted code has run in it, so its exit status is
    ours."""
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
