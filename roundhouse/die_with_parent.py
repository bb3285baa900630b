"""Start a command that does not outlive the supervisor: `python -m roundhouse.die_with_parent <parent> <command> …`.

Invariant: on Linux the kernel sends SIGTERM to the command when its parent dies in any way; elsewhere the next `up` or
`down` ends remaining processes. The command replaces this process, which leaves nothing in memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(how: signal.Signals) -> None:
    """From here on the kernel sends this process the signal when its parent dies; nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)


def main() -> None:
    end_with_parent(signal.SIGTERM)
    if sys.platform == "linux" and os.getppid() != int(sys.argv[1]):
        sys.exit("The supervisor died before its service began.")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
