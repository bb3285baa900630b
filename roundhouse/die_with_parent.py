"""Start a command that does not outlive the supervisor: `python -m roundhouse.die_with_parent <parent> <command> …`.

Invariant: on Linux the kernel sends SIGTERM to the command when its parent dies in any way; elsewhere the next `up` or
`down` ends remaining processes. The command replaces this process (exec), so no extra process remains.

With `--guard` after the parent, this process stays as the command's parent (on Linux) and exits with the command's exit
code or signal. When the command ends or the supervisor dies, it ends all processes that the command has left: the
kernel makes this process the parent of every orphan, even of a process in another session.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GUARD = "--guard"
GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL for processes that the command leaves."""


def end_with_parent(how: signal.Signals) -> None:
    """Set the signal that the kernel sends to this process when its parent dies. No effect on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)


def main() -> None:
    end_with_parent(signal.SIGTERM)
    if sys.platform == "linux" and os.getppid() != int(sys.argv[1]):
        sys.exit("The supervisor died before its service began.")
    command = sys.argv[2:]
    if command[0] == GUARD:
        command = command[1:]
        if sys.platform == "linux":
            guard(command, int(sys.argv[1]))
    os.execv(command[0], command)


def guard(command: list[str], parent: int) -> None:
    """Run the command as a child. When it or the parent ends, end all its processes, and exit with its exit code or
    signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mine, ended = os.getpid(), 0

    def terminated(*_: object) -> None:
        if os.getppid() != parent:  # otherwise the supervisor has sent it to the other processes, too
            _end_children()
            os._exit(1)

    signal.signal(signal.SIGTERM, terminated)
    if (child := os.fork()) == 0:
        end_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getppid() == mine:
            os.execv(command[0], command)
        os._exit(1)
    while ended != child:
        ended, status = os.wait()
    _end_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(mine, -code)
    os._exit(code if code >= 0 else 1)


def _end_children() -> None:
    """End all children, and theirs, which become children of this process when their parents end."""
    signaled_pids: set[int] = set()
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        is_late = time.monotonic() > deadline
        for child in _children():
            if child not in signaled_pids or is_late:
                signaled_pids.add(child)
                os.kill(child, signal.SIGKILL if is_late else signal.SIGTERM)
        time.sleep(0.01)


def _children() -> list[int]:
    """Return the children of this process; none is reaped elsewhere, so a number stays theirs."""
    return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    main()
