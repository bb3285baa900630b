"""Identity of a process: its number, its birth and the machine's boot.

Invariant: these three together name one process for good. A number alone names any process that has it now, and the
wall clock may be set during a process's life.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def birth(pid: int) -> float | None:
    """Return the start time of a process: clock ticks since boot on Linux, seconds since the epoch elsewhere. None:
    it does not exist."""
    try:
        if _BOOT_ID.exists():
            # The command's name, in brackets, may hold blanks; the start time is the 20th field after it.
            return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return psutil.Process(pid).create_time()
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None


def is_alive(pid: int, born: float) -> bool:
    """Does that very process still run? A zombie does not."""
    try:
        return birth(pid) == born and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def boot_id() -> str:
    """Names this start of this machine."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"{psutil.boot_time():.0f}"
