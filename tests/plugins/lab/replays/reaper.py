"""CPU seconds of a command and of all its descendants, however they ended.

    python -m tests.plugins.lab.replays.reaper COMMAND …

Processes with a killed parent become children of this one, which waits for all of them. The last line is JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    subprocess.Popen(command)
    seconds = 0.0
    while True:
        try:
            _, _, usage = os.wait3(0)
        except ChildProcessError:
            break
        seconds += usage.ru_utime + usage.ru_stime
    sys.stdout.write(json.dumps({"cpu_seconds": seconds}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
