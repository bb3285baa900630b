"""Ends what a process leaves behind: `python -m roundhouse.infra.reaper <mark>`, with a pipe from that process as stdin.

Invariant: when the pipe closes, by whatever end of the process that holds its other side, no process that carries the mark in
its environment is left. It stays out of the terminal's reach (a session of its own), so that Ctrl-C does not end it first.
"""

from __future__ import annotations

import os
import signal
import sys

from roundhouse.infra import processes

GRACE_SECONDS = 5.0


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1024):
        continue
    processes.end(lambda: processes.carrying(sys.argv[1]), grace_seconds=GRACE_SECONDS)


if __name__ == "__main__":
    main()
