"""The inside of the sandbox: runs as a process of its own, before it locks itself in for good.

Invariant: untrusted code runs only after the lock holds: limits on CPU, memory and output, and a system-call filter (seccomp)
that lets through reading and writing of what is already open, memory, clocks and exit. Opening a file or a socket, starting a
process or a thread, sleeping, and signalling another process fail with errno EPERM. Where the lock cannot be put on, the
process ends with `NO_LOCK` and runs nothing.

Stdin: {"code", "function", "inputs": [[arguments], …], "cpu_seconds", "memory_bytes", "output_bytes"}.
Stdout: [{"value": …} or {"error": "ZeroDivisionError"}, …], one an input; {"error": …} when the code defines no function.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

NO_LOCK = 71
FILES = 16
IMPORTABLE = ("bisect", "collections", "functools", "heapq", "itertools", "math", "operator", "re", "string", "typing")
"""What untrusted code may import, beside modules without files such as `time`."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> column in CALLS, and its number in the filter."""
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "sched_yield": (24, 124), "futex": (202, 98),
    "gettimeofday": (96, 169), "clock_gettime": (228, 113), "getrandom": (318, 278), "getpid": (39, 172), "gettid": (186, 178),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""The system calls that are let through. Files and sockets cannot be opened with them, only what is open can be used."""

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
"""Of seccomp: let through; fail with errno 1 (EPERM); end the process."""


def lock(cpu_seconds: int, memory_bytes: int, output_bytes: int) -> None:
    """Limit this process and filter its system calls; there is no way back.

    Raises:
        OSError: the system does not support it.
    """
    for name, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (limit, limit))
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise OSError(f"no system-call filter for {sys.platform} on {machine}")
    column, architecture = ARCHITECTURES[machine]
    _filter_calls(architecture, [numbers[column] for numbers in CALLS.values()])


def _filter_calls(architecture: int, allowed: list[int]) -> None:
    last = len(allowed)
    program = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += [(_JUMP_IF_EQUAL, last - index, 0, number) for index, number in enumerate(allowed)]
    program += [(_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    control = ctypes.CDLL(None, use_errno=True).prctl
    if control(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or control(_SET_SECCOMP, _FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")


def run(code: str, function: str, inputs: list[list[Any]]) -> str:
    """What `function` of `code` returns for each of the inputs, as JSON texts."""
    try:
        names: dict[str, Any] = {"__name__": "answer"}
        exec(compile(code, "<answer>", "exec"), names)
        call = names[function]
    except BaseException as error:  # noqa: BLE001 - untrusted code may raise anything, SystemExit too
        return json.dumps({"error": type(error).__name__})
    return "[" + ", ".join(_outcome(call, arguments) for arguments in inputs) + "]"


def _outcome(call: Any, arguments: list[Any]) -> str:
    try:
        return json.dumps({"value": call(*arguments)}, allow_nan=False)
    except BaseException as error:  # noqa: BLE001 - as above
        return json.dumps({"error": type(error).__name__})


class _Nowhere:
    """What untrusted code prints goes here."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def main() -> None:
    request = json.load(sys.stdin)
    sys.stdout = sys.stderr = _Nowhere()
    try:
        lock(request["cpu_seconds"], request["memory_bytes"], request["output_bytes"])
    except (OSError, ValueError):
        os._exit(NO_LOCK)
    os.write(1, run(request["code"], request["function"], request["inputs"]).encode())
    os._exit(0)


if __name__ == "__main__":
    # Loaded before files are out of reach.
    for module in IMPORTABLE:
        __import__(module)
    main()
