"""The inside of a local sandbox: a script that builds a small root, confines itself to it, and runs commands there.

Invariants
- Untrusted code runs only after `LOCKED` is written; without namespaces or the filter, the process ends with `NO_LOCK`
  and has
  run nothing.
- A command sees read-only programs (/usr, the interpreter), its working directory, /tmp and further directories (memory,
  of limited size), and no
  other process, network, device, or file of the machine. It lacks all capabilities and cannot get one.
- When a command ends, or reaches a limit, all its processes are killed: between two commands the sandbox is its files.
- The sandbox ends with its first process: when stdin is closed (its owner is gone) or its lifetime is over.

Stdin: a line of settings, then a line per command, as JSON; stdout: `LOCKED`, then a line per result. See `serve`.

The script needs user namespaces, or root. Root gives every sandbox a separate user, so that processes are counted by
sandbox.
"""

import base64
import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

WORK = "/sandbox"
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
"""Directories of the machine that a sandbox sees, read-only, in addition to the interpreter."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
FIRST_USER = 2_000_000
"""First of the users that root gives to sandboxes; the process ID is added."""
OPEN_FILES = 256
INODES = 20_000

_NEW_CGROUP, _NEW_USER, _NEW_NAMESPACES = 0x02000000, 0x10000000, 0x7C020000
"""Flags of clone: the last is user, mount, process, network, IPC and host name."""
_READ_ONLY, _NO_SET_USER, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH, _DEATH_SIGNAL, _CAPABILITIES_3 = 2, 1, 0x20080522
_PIVOT_ROOT = (155, 41)
"""Numbers of system calls on x86_64 and aarch64, here and below."""
REFUSED_CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "socket": (41, 198), "kexec_load": (246, 104),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224),
    "quotactl": (179, 60), "syslog": (103, 116), "acct": (163, 89), "memfd_secret": (447, 447), "mq_open": (240, 180),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279),
}  # fmt: skip
"""Without `socket`, no network family works, including those without a namespace (vsock). Unmapped memory of
`memfd_create` counts for no limit of a process."""
_CLONE, _CLONE_3 = (56, 220), 435
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_SET, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _DENY, _ABSENT, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
"""Actions of seccomp: permit; fail with EPERM; fail with ENOSYS, after which C libraries use `clone`; end the
process."""
_X32 = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    checked(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def enter_namespaces() -> tuple[int, int]:
    """New namespaces for the next child; user and group of commands there."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        checked(libc.unshare(_NEW_NAMESPACES & ~_NEW_USER), "unshare")
        return FIRST_USER + os.getpid(), FIRST_USER + os.getpid()
    checked(libc.unshare(_NEW_NAMESPACES), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return user, group


def build_root(disk_bytes: int, directories: list[str], user: int, group: int) -> None:
    """Make a root of read-only views and memory, and leave the machine's for good."""
    root = "/sys"  # exists everywhere and is not in SHOWN; only this mount namespace sees the mount over it
    mount("none", "/", None, _RECURSIVE | _PRIVATE)
    mount("none", root, "tmpfs", _NO_SET_USER, "size=1m,mode=755")
    for path in (*sorted(directories), WORK, "/tmp"):  # first: the interpreter may be in one of them
        os.makedirs(root + path, exist_ok=True)
        options = f"size={disk_bytes},nr_inodes={INODES},mode=700,uid={user},gid={group}"
        mount("none", root + path, "tmpfs", _NO_SET_USER | _NO_DEVICES, options)
    for path in dict.fromkeys((*SHOWN, sys.base_prefix)):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path) and not path.startswith("/usr/"):
            _show(path, root + path)
            mount("none", root + path, None, _BIND | _REMOUNT | _READ_ONLY | _NO_SET_USER | _NO_DEVICES)
    for path in DEVICES:
        _show(path, root + path)
    # Users differ between sandboxes; a listing shows this name in all of them
    for path, owner, other in (("passwd", f"{user}:{group}::{WORK}:/bin/sh", "0:0::/:"), ("group", f"{group}:", "0:")):
        with open(f"{root}/etc/{path}", "w") as file:
            file.write(f"root:x:{other}\nsandbox:x:{owner}\n")
    os.chdir(root)
    column = 0 if os.uname().machine == "x86_64" else 1
    checked(libc.syscall(_PIVOT_ROOT[column], b".", b"."), "pivot_root")
    checked(libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")
    mount("none", "/", None, _BIND | _REMOUNT | _READ_ONLY | _NO_SET_USER)


def _show(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, None, _BIND)


def refuse_calls(architecture: int, column: int) -> None:
    """Refuse REFUSED_CALLS, new namespaces, and system calls of other modes of the processor, irrevocably."""
    refused = [numbers[column] for numbers in REFUSED_CALLS.values()]
    program = [
        (_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0), (_JUMP_IF_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL),
        (_JUMP_IF_EQUAL, 0, 1, _CLONE_3), (_RETURN, 0, 0, _ABSENT),
    ]  # fmt: skip
    program += [(_JUMP_IF_EQUAL, len(refused) - index + 3, 0, number) for index, number in enumerate(refused)]
    program += [
        (_JUMP_IF_EQUAL, 0, 2, _CLONE[column]), (_LOAD, 0, 0, 16),
        (_JUMP_IF_SET, 1, 0, _NEW_NAMESPACES | _NEW_CGROUP),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    checked(libc.prctl(38, 1, 0, 0, 0), "no new privileges")
    checked(libc.prctl(22, 2, header, 0, 0), "seccomp")


def confine(settings: dict[str, Any], seconds: float, user: int, group: int) -> None:
    """Limit this process and its children, and drop its rights, irrevocably."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
    header = ctypes.create_string_buffer(struct.pack("II", _CAPABILITIES_3, 0))
    checked(libc.capset(header, ctypes.create_string_buffer(24)), "capset")
    processor = math.ceil(seconds) + 1
    for name, limit in (
        (resource.RLIMIT_CPU, processor),
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["disk_bytes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, settings["processes"]),
        (resource.RLIMIT_CORE, 1),
    ):
        resource.setrlimit(name, (limit, limit))
    refuse_calls(*settings["filter"])


def start_command(request: dict[str, Any], settings: dict[str, Any], user: int, group: int) -> tuple[int, int]:
    """Process id of the confined command, and the end of the pipe that has its output."""
    ours, theirs = os.pipe()
    stdin = os.memfd_create("stdin")
    os.write(stdin, base64.b64decode(request["stdin"]))
    os.lseek(stdin, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number, descriptor in enumerate((stdin, theirs, theirs)):
                os.dup2(descriptor, number)
            os.closerange(3, OPEN_FILES)
            os.chdir(WORK)
            confine(settings, request["seconds"], user, group)
            os.execvpe(request["arguments"][0], request["arguments"], settings["variables"])
        except BaseException as error:  # noqa: BLE001 - a fork of the first process must never return into its loop
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(126)
    os.close(theirs)
    os.close(stdin)
    return pid, ours


def run(request: dict[str, Any], settings: dict[str, Any], user: int, group: int) -> dict[str, Any]:
    """The result of one command; afterwards no process but this one is left."""
    deadline = time.monotonic() + request["seconds"]
    pid, output = start_command(request, settings, user, group)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (output, ended):
        poll.register(descriptor, select.POLLIN)
    poll.register(0, select.POLLHUP)
    content, limit, timed_out = bytearray(), request["output_bytes"], False
    while len(content) <= limit:
        ready = dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
        if 0 in ready:
            os._exit(0)
        if ended in ready:
            break
        if output in ready and (more := os.read(output, 65536)):
            content += more
        elif output in ready:
            poll.unregister(output)  # it closed its output and continues
        else:
            timed_out = True
            break
    status = _end_all(pid)
    while len(content) <= limit and (more := os.read(output, 65536)):
        content += more
    os.close(output)
    os.close(ended)
    payload = base64.b64encode(bytes(content[:limit])).decode()
    return {"status": status, "output": payload, "timed_out": timed_out, "truncated": len(content) > limit}


def _end_all(command: int) -> int:
    """Kill every process of the sandbox but this one; how the command ended."""
    status = 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.wait()
            if pid == command:
                status = os.waitstatus_to_exitcode(ended)
    return status


def serve(settings: dict[str, Any], user: int, group: int) -> NoReturn:
    """Run commands until stdin ends or the lifetime is over.

    A request: {"arguments", "stdin": base64, "seconds", "output_bytes"}; a result: {"status", "output": base64, "timed_out",
    "truncated"}; the status of a killed command is the negative number of the signal.
    """
    end = time.monotonic() + settings["lifetime_seconds"]
    poll = select.poll()
    poll.register(0, select.POLLIN)
    unread = bytearray()
    while poll.poll(max(0.0, 1000 * (end - time.monotonic()))) and (more := os.read(0, 1 << 20)):
        unread += more
        if unread.endswith(b"\n"):
            answer = json.dumps(run(json.loads(unread), settings, user, group)).encode() + b"\n"
            unread.clear()
            while answer:
                answer = answer[os.write(1, answer) :]
    os._exit(0)


def main() -> None:
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))
    from sandbox_child import ARCHITECTURES, LOCKED, NO_LOCK

    settings = json.loads(sys.stdin.buffer.readline())
    try:
        column, architecture = ARCHITECTURES[os.uname().machine]
        settings["filter"] = (architecture, column)
        user, group = enter_namespaces()
        pid = os.fork()
        if pid:
            # Nothing of this process is needed any more: it stands for the sandbox, of which the machine knows its process id
            _, status = os.waitpid(pid, 0)
            os._exit(max(0, os.waitstatus_to_exitcode(status)))
        os.umask(0o022)
        checked(libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "death signal")
        build_root(settings["disk_bytes"], settings["directories"], user, group)
        probe = {"arguments": ["true"], "stdin": "", "seconds": 10, "output_bytes": 200}
        if run(probe, settings, user, group)["status"]:
            raise OSError("a confined process cannot run")
    except (OSError, ValueError, KeyError):
        os._exit(NO_LOCK)
    os.write(1, LOCKED)
    serve(settings, user, group)


if __name__ == "__main__":
    main()
