"""Attempts to break out of the locked process in which a policy's code runs, beyond those of the environment's own tests."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import time
from pathlib import Path

import psutil
import pytest

from roundhouse.environments.sandbox import CodeFailed, Limits, LockedPython

BOX = LockedPython(concurrency=1, limits=Limits(cpu_seconds=1, wall_seconds=10))
CANARY = "canary-1f0e77"
FUTEX = 202 if platform.machine() == "x86_64" else 98


def outcome(body: str) -> str | None:
    """Return the result of `f` as JSON."""
    lines = "\n".join(f"    {line}" for line in body.strip().split("\n"))
    return BOX.call_blocking(
        f"import os, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\ndef f():\n{lines}", "f", [[]]
    )[0]


def test_nothing_of_the_parent_is_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", CANARY)
    (tmp_path / "secret").write_text(CANARY)
    descriptors = [os.open(tmp_path / "secret", os.O_RDONLY) for _ in range(8)]
    try:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        found = outcome("""
held = []
for number in range(3, 1024):
    try:
        held.append(os.read(number, 100))
    except OSError:
        pass
return [str(held), str(dict(os.environ))]
""")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert found is not None
    assert CANARY not in found
    assert found.startswith('["[]"')


@pytest.mark.parametrize(
    "call",
    [
        "libc.process_vm_readv(os.getpid(), ctypes.create_string_buffer(64), 1, ctypes.create_string_buffer(64), 1, 0)",
        "libc.ptrace(16, 1, 0, 0)",
        "libc.kill(-1, 9)",
        "libc.syscall(0x40000002, b'/etc/passwd', 0)",
        "libc.memfd_create(b'x', 0)",
        "libc.pipe(ctypes.create_string_buffer(8))",
        "libc.unshare(0x10000000)",
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "libc.chroot(b'/')",
        "libc.setns(0, 0)",
        "libc.shmget(1, 4096, 0o1777)",
        "libc.socketpair(1, 1, 0, ctypes.create_string_buffer(8))",
        "libc.dup(1)",
        "libc.ioctl(0, 0x5412, ctypes.create_string_buffer(b'x'))",
        "libc.fcntl(1, 0)",
        "libc.syscall(435, 0, 0)",
        "libc.syscall(425, 8, 0)",
        "libc.setpriority(0, 0, -20)",
        f"libc.syscall({FUTEX}, ctypes.create_string_buffer(4), 0, 0, 0)",
        f"libc.syscall({FUTEX}, ctypes.create_string_buffer(4), 137, 0, 0, 0, -1)",
    ],
)
def test_the_kernel_refuses(call: str) -> None:
    assert outcome(f"ctypes.set_errno(0)\nresult = {call}\nreturn [result, ctypes.get_errno()]") == "[-1, 1]"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")
def test_the_other_systems_calls_of_the_processor_end_the_process() -> None:
    """`int 0x80` numbers its calls differently: number 5 opens a file there."""
    code = b"\xb8\x05\x00\x00\x00\xcd\x80\xc3"
    body = f"""
import ctypes
libc.mmap.restype = ctypes.c_void_p
place = libc.mmap(0, 4096, {mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC}, 0x22, -1, 0)
ctypes.memmove(place, {code!r}, {len(code)})
return ctypes.CFUNCTYPE(ctypes.c_int)(place)()
"""
    with pytest.raises(CodeFailed, match="crash"):
        outcome(body)
    assert ctypes.sizeof(ctypes.c_void_p) == 8


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("libc.signal(24, 1)\nlibc.signal(9, 1)\nwhile True: pass", "time"),
        ("while True:\n  try:\n    os.fork()\n  except OSError: pass", "time"),
        ("os.write(1, b'[' * 60000)\nos._exit(0)", "crash"),
        ("os.write(1, b'[{\"value\": ' + b'[' * 20000 + b']' * 20000 + b'}]')\nos._exit(0)", "crash"),
        ("os.write(1, b'[' + b'9' * 50000 + b']')\nos._exit(0)", "crash"),
        ("os.write(1, b'\\xff\\xfe')\nos._exit(0)", "crash"),
    ],
    ids=["it ignores the signals", "a fork bomb", "deep JSON", "deep JSON that ends", "a huge number", "no text"],
)
def test_an_attack_on_this_side_is_a_failure_of_the_code(body: str, why: str) -> None:
    begun = time.monotonic()
    with pytest.raises(CodeFailed, match=f"^{why}$"):
        outcome(body)
    assert time.monotonic() - begun < 8


def test_memory_is_refused_and_not_taken() -> None:
    before = psutil.virtual_memory().available
    assert outcome("held = []\nwhile True: held.append(bytearray(10**7))") is None
    assert before - psutil.virtual_memory().available < 2**30


def test_no_file_can_be_filled_and_no_process_is_left() -> None:
    body = """
total = 0
for number in (0, 1):
    try:
        while True:
            total += os.write(number, b'x' * 4096)
    except OSError:
        pass
os._exit(total > 10**6)
"""
    with pytest.raises(CodeFailed):
        outcome(body)
    assert [command for command in _commands_of_children() if "sandbox_child" in command] == []


def _commands_of_children() -> list[str]:
    """Return the commands of the live processes under this one; a zombie has no command."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one too
            found.append(" ".join(child.cmdline()))
    return found
