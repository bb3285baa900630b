"""CPU: the best number of threads for a model, the processor's abilities, and CPU seconds per stage.

Threads: a requested number is used; otherwise the model's size decides. A small model's work on one token is shorter
than the wait of two threads for each other: at 0.66 M parameters two threads generated 1,000 to 1,300 tokens/s on two
busy cores, one thread 6,600 to 8,600. From some ten million parameters on, matrix products take nearly all the time,
and scale well.

Seconds: those of a thread within `attribute_to_this_stage` count for the stage of that thread alone; all others count
for the stage that measures the process. The seconds of stages that run concurrently in several threads therefore add
up.

    with attribute_to_this_stage():   in each thread of a stage that runs concurrently with others
        seconds = clock()             of this thread here; of the process without such threads elsewhere
        seconds() - seconds()

Work that a thread within the block gives to other threads is attributed to the process. If the system does not report
one thread's CPU time to others (Linux does), it is subtracted from the process's when the thread leaves the block.

Programs: other processes of this machine that work for this one (`ProgramCpu`). Each of their seconds is counted at
most once: for the stage that takes it, or as lost, if a program ended without a result.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roundhouse.pretrained import text_part

SEVERAL_THREADS_FROM = 10_000_000
"""Parameters from which on more than one thread is taken."""
CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx10_2", "bf16"}
"""x86's flags and, the last, that of Arm."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(parameters: int, asked: int = 0, *, processes: int = 1) -> int:
    """Return the number of threads of one process that computes a model. Engine and trainer take turns, so each may
    have all cores.

    Args:
        asked: configured number; 0 decides by the size.
        processes: number of processes that share the cores.
    """
    if asked:
        return asked
    return 1 if parameters < SEVERAL_THREADS_FROM else max(1, available_cores() // processes)


def slowness() -> float:
    """Return the factor by which work may take longer than on an idle machine: the load per core, within 1 to 6."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return min(6.0, max(1.0, load / available_cores()))


def parameters_of(config_file: Path) -> int:
    """Return the approximate number of a model's parameters from its config.json; 0 if unknown."""
    config = text_part(json.loads(config_file.read_text(encoding="utf-8")))
    try:
        hidden, layers, vocabulary = (config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    except KeyError:
        return 0
    inner = config.get("intermediate_size") or 4 * hidden
    return int(layers * (4 * hidden * hidden + 3 * hidden * inner) + vocabulary * hidden)


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor has instructions for bfloat16; if unknown, True."""
    if platform.system() != "Linux" or not cpuinfo.exists():
        return True
    lines = cpuinfo.read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), None)
    return flags is None or not _BFLOAT16.isdisjoint(flags)


Clock = Callable[[], float]

_lock = threading.Lock()
_ended = 0.0
"""Seconds of threads that have left the block."""
_at_work: dict[int, tuple[int | None, float]] = {}
"""By thread within the block: its clock, and the clock's initial value."""
_helped: dict[int, float] = {}
"""By thread within the block: seconds of threads that have worked for it."""


@contextmanager
def attribute_to_this_stage() -> Iterator[None]:
    """Count this thread for a separate stage, concurrently with others; nested blocks change nothing."""
    global _ended
    thread = threading.get_ident()
    if thread in _at_work:
        yield
        return
    find_clock = getattr(time, "pthread_getcpuclockid", None)
    began = time.thread_time()
    with _lock:
        _at_work[thread] = (find_clock(thread) if find_clock else None, began)
    try:
        yield
    finally:
        with _lock:
            del _at_work[thread]
            _helped.pop(thread, None)
            _ended += time.thread_time() - began


@contextmanager
def attribute_to_stage_of(other: int) -> Iterator[None]:
    """Count this thread and its helpers for another thread (`threading.get_ident`). If that one is within the block
    above, it gets their seconds once this thread has left this block; otherwise the process gets them, as without
    it."""
    if other not in _at_work:
        yield
        return
    used = 0.0
    try:
        with attribute_to_this_stage():
            seconds = clock()
            began = seconds()
            try:
                yield
            finally:
                used = seconds() - began
    finally:
        with _lock:
            _helped[other] = _helped.get(other, 0.0) + used


def clock() -> Clock:
    """Return the clock for a stage that this thread begins."""
    thread = threading.get_ident()
    return (lambda: time.thread_time() + _helped.get(thread, 0.0)) if thread in _at_work else process_seconds


def process_seconds() -> float:
    """CPU seconds of this process, without the threads within `attribute_to_this_stage`."""
    with _lock:
        elsewhere = _ended + sum(
            time.clock_gettime(clock_id) - began for clock_id, began in _at_work.values() if clock_id is not None
        )
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime - elsewhere


@dataclass(eq=False, slots=True)
class ProgramCpu:
    """CPU seconds of one program, with those of all processes that it started."""

    stage: str
    """Stage that it works for: the URI of its directory, or its kind if a program serves one iteration after another."""
    read: Callable[[], float]
    """CPU seconds so far, as the system has them: a lower bound, since those of a process that nobody waited for are gone."""
    seconds: float = 0.0
    """The most that was read."""
    given: float = 0.0
    """Part of these that a stage took or that is lost."""
    has_ended: bool = False

    def __post_init__(self) -> None:
        with _lock:
            _programs.append(self)

    def end(self, seconds: float, *, is_lost: bool) -> None:
        """It used so many seconds in all. Those of a lost program that no stage has taken before are lost."""
        global _lost
        with _lock:
            self.seconds, self.has_ended = max(self.seconds, seconds), True
            if is_lost:
                _lost += self.give()

    def look(self) -> float:
        """Its seconds up to now."""
        if not self.has_ended:
            self.seconds = max(self.seconds, self.read())
        return self.seconds

    def give(self) -> float:
        """The seconds up to now that were not given before."""
        global _of_ended
        before, self.given = self.given, self.look()
        if self.has_ended:
            _programs.remove(self)
            _of_ended += self.seconds
        return self.given - before


_programs: list[ProgramCpu] = []
"""Running programs, and ended ones with uncounted seconds."""
_of_ended = 0.0
"""Seconds of programs that have ended and given all."""
_lost = 0.0
"""Lost seconds of all programs."""


def programs_seconds() -> tuple[float, float]:
    """CPU seconds that the programs of this process have used up to now; and how many of these are lost."""
    with _lock:
        return _of_ended + sum(program.look() for program in _programs), _lost


def take_seconds(stage: str, *, as_lost: bool = False) -> float:
    """Take the uncounted seconds of a stage's programs. `as_lost`: their attempt failed."""
    global _lost
    with _lock:
        taken = sum(program.give() for program in list(_programs) if program.stage == stage)
        _lost += taken if as_lost else 0.0
    return taken
