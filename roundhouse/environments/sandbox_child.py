"""The inside of the sandbox: a separate process that locks itself in before untrusted code runs.

Invariant: untrusted code runs only after the lock holds: limits on CPU, memory and output, and a system-call filter
(seccomp) that permits reading and writing of open files, memory, clocks and exit. Opening a file or a socket, starting
a process or a thread, sleeping, waiting for a lock, and signalling fail with errno EPERM: locked code computes or ends.
`LOCKED` is written once the lock holds; without a lock, the process ends with `NO_LOCK` and runs nothing.

Stdin: {"code", "function", "inputs": [[arguments], …], "cpu_seconds", "memory_bytes", "output_bytes"}. Stdout: LOCKED,
then [{"value": …} or {"error": "ZeroDivisionError"}, …], one per input; {"error": …} if the code does not define the
function. Stdout is a pipe, so no code can take `LOCKED` back.

Starting is most of a call's cost, so this file imports little: `typing` alone would add a sixth.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

NO_LOCK = 71
"""Exit status. It is meaningful only without `LOCKED`: untrusted code may exit with any status."""
LOCKED = b"L"
FILES = 16
IMPORTABLE = (
    "bisect", "collections", "contextlib", "functools", "heapq", "itertools", "math", "operator", "re", "string", "typing",
    "warnings",
)  # fmt: skip
"""Modules that untrusted code may import if its text has the name, in addition to modules without files such as
`time`."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column in CALLS, and its number in the filter."""
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "sched_yield": (24, 124),
    "gettimeofday": (96, 169), "clock_gettime": (228, 113), "getrandom": (318, 278), "getpid": (39, 172), "gettid": (186, 178),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""Permitted system calls. They cannot open files and sockets, only use open ones."""
FUTEX = (202, 98)
FUTEX_WAKE = (1, 129)
"""Its operation and the same for memory of one process: the only ones let through. The C library wakes even without a waiter; a
wait of the only thread would never end."""

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ARCHITECTURE, _NUMBER, _SECOND_ARGUMENT = 4, 0, 24
"""Offsets in `struct seccomp_data` for the filter (both machines are little-endian)."""
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Actions of seccomp: permit; fail with errno 1 (EPERM); end the process."""


def lock(cpu_seconds: int, memory_bytes: int, output_bytes: int, more_calls: Sequence[tuple[int, int]] = ()) -> None:
    """Limit this process and filter its system calls, irrevocably.

    Args:
        more_calls: permitted in addition to CALLS.

    Raises:
        OSError: the system does not support it.
    """
    # SIGXCPU at the first limit identifies this cause. Code that ignores it is killed at the second, after more CPU
    # time than allowed; a kill at less came from outside.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    for name, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_NPROC, 0),
        (
            resource.RLIMIT_CORE,
            1,
        ),  # at 0 the kernel still feeds a crash to a core handler, which takes its time; not at 1
    ):
        resource.setrlimit(name, (limit, limit))
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise OSError(f"no system-call filter for {sys.platform} on {machine}")
    column, architecture = ARCHITECTURES[machine]
    allowed = [numbers[column] for numbers in (*CALLS.values(), *more_calls)]
    futex = FUTEX[column]
    rest = [
        (_JUMP_IF_EQUAL, 0, 3, futex),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_JUMP_IF_EQUAL, 2, 0, FUTEX_WAKE[0]),
        (_JUMP_IF_EQUAL, 1, 0, FUTEX_WAKE[1]),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    last = len(allowed) + len(rest) - 2
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER)]
    program += [(_JUMP_IF_EQUAL, last - index, 0, number) for index, number in enumerate(allowed)]
    program += rest
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    control = ctypes.CDLL(None, use_errno=True).prctl
    if control(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or control(_SET_SECCOMP, _FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")


def run(code: str, function: str, inputs: list[list[Any]]) -> str:
    """Return the results of `function` of `code` for each of the inputs, as JSON texts."""
    try:
        names: dict[str, Any] = {"__name__": "answer"}
        exec(compile(code, "<answer>", "exec"), names)
        call = names[function]
    except BaseException as error:  # noqa: BLE001 - untrusted code may raise anything, SystemExit too
        return json.dumps({"error": type(error).__name__})
    return "[" + ", ".join(_outcome(call, arguments) for arguments in inputs) + "]"


def _outcome(call: Any, arguments: list[Any]) -> str:
    try:
        value = call(*arguments)
        _check_keys(value)
        return json.dumps({"value": value}, allow_nan=False)
    except BaseException as error:  # noqa: BLE001 - as above
        return json.dumps({"error": type(error).__name__})


def _check_keys(value: Any) -> None:
    """Check keys, because `json` writes the keys 1, 1.0 and true as text, so that other values would equal the expected
    ones.

    Raises:
        TypeError: a key is not a text.
    """
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key that is not a text")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for each in value:
        _check_keys(each)


class _Nowhere:
    """Sink of untrusted code's printed output."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def main() -> None:
    request = json.load(sys.stdin)
    sys.stdout = sys.stderr = _Nowhere()
    for module in IMPORTABLE:  # now: once it is locked, files are out of reach
        if module in request["code"]:
            __import__(module)
    try:
        lock(request["cpu_seconds"], request["memory_bytes"], request["output_bytes"])
    except (OSError, ValueError):
        os._exit(NO_LOCK)
    os.write(1, LOCKED)
    os.write(1, run(request["code"], request["function"], request["inputs"]).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
