"""CPU seconds of everything that this process started: services, actors and workers included, and what has ended.

Invariant: the sum never misses a process that left its parent. This process adopts orphans (Linux's child subreaper), so that
a service in a session of its own stays below it, alive or as a zombie whose seconds the kernel keeps.

    tree = ProcessTree()
    before = tree.seconds()
    subprocess.run([...])
    tree.seconds() - before

What a process below here reaped is in its own figure. Only seconds of a process whose parent ignores its end (SIGCHLD) are lost
with it; `Recording.ignoring` has such parents. This process's own seconds are not counted.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil

EVERY_SECONDS = 3.0
"""Between two readings of a `Recording`."""
_SET_CHILD_SUBREAPER = 36
_SIGCHLD = 1 << 16


class ProcessTree:
    """The processes below this one; made before the first of them."""

    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "this process cannot adopt orphans, so their seconds would be missed")

    def seconds(self, alive: Sequence[psutil.Process] | None = None) -> float:
        """User and system seconds of all of them until now; `alive` is what was just read."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = usage.ru_utime + usage.ru_stime
        for process in self.alive() if alive is None else alive:
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return total

    def alive(self) -> list[psutil.Process]:
        """All of them that have not been reaped."""
        return psutil.Process(os.getpid()).children(recursive=True)


class Recording:
    """The tree's seconds over time, read every few seconds while the block lasts.

    Args:
        kind_of: from a command line to what its process is, for `by_kind`.
    """

    def __init__(self, tree: ProcessTree, kind_of: Callable[[str], str]) -> None:
        self._tree, self._kind_of, self._first = tree, kind_of, tree.seconds()
        self._samples = [(time.time(), 0.0)]
        self._known: set[int] = set()
        self._own: dict[psutil.Process, tuple[str, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.ignoring: set[str] = set()
        """Kinds of processes that ignored the end of their children when they were first seen."""

    def __enter__(self) -> Recording:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._read()

    @property
    def total(self) -> float:
        """Seconds used until the block ended."""
        return self._samples[-1][1]

    def at(self, moment: float) -> float:
        """Seconds used until this moment (of the epoch), in a straight line between two readings."""
        times, values = zip(*self._samples, strict=True)
        return float(np.interp(moment, times, values))

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind, the most first; of a process its last reading, so that the rest of the total is no kind's."""
        found: dict[str, float] = {}
        for kind, seconds in self._own.values():
            found[kind] = found.get(kind, 0.0) + seconds
        return {kind: round(found[kind], 1) for kind in sorted(found, key=lambda kind: -found[kind])}

    def _run(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self._read()

    def _read(self) -> None:
        alive = self._tree.alive()
        self._samples.append((time.time(), self._tree.seconds(alive) - self._first))
        for process in alive:
            try:
                kind = self._kind_of(" ".join(process.cmdline()) or process.name())
                self._own[process] = (kind, sum(process.cpu_times()[:2]))
                if process.pid not in self._known:
                    self._known.add(process.pid)
                    self.ignoring |= {kind} if _ignores_children(process.pid) else set()
            except psutil.NoSuchProcess:
                continue


def _ignores_children(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    ignored = next((line.split()[1] for line in lines if line.startswith("SigIgn:")), "0")
    return bool(int(ignored, 16) & _SIGCHLD)
