"""Finding and ending every process of a service, however deep it was started.

Invariant: a process belongs to a service when its environment carries the service's mark, or when it is in the session that
the service was started in. Both are inherited; a process has to shed both to escape. The caller itself never belongs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from roundhouse.infra.state import StateDirectory
from roundhouse.store.process_identity import birth, boot_id

MARK = "ROUNDHOUSE_SERVICE_OF"
"""Environment variable of every process of a service: `<state directory>::<service>`."""
KILL_SECONDS = 10.0
TAIL_BYTES = 20_000
"""Most that is read of a log's end."""


class Session(NamedTuple):
    """A session of processes, which one of ours leads or led."""

    leader: int
    born: float
    """When the leader was started, as `birth` has it."""

    @classmethod
    def of(cls, leader: int) -> Session:
        """The session of a process that was started just now to lead it, and is still to be waited for."""
        return cls(leader, birth(leader) or 0.0)


def mark(state: StateDirectory, service: str) -> str:
    return f"{state.path}::{service}"


def members(state: StateDirectory, service: str | None = None) -> list[psutil.Process]:
    """Live processes of one service, or of all."""
    running = state.running()
    records = [record for name, record in running.services.items() if service in (None, name)]
    sessions = {
        record.process_group: record.born
        for record in records
        if running.boot_id == boot_id() and record.process_group and _is_still(record.pid, record.born)
    }
    wanted = mark(state, service) if service else f"{state.path}::"
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        if _marked(process, wanted, exact=service is not None) or _in_session(process, sessions):
            found.append(process)
    return found


def carrying(marked: str, sessions: Iterable[Session] = ()) -> list[psutil.Process]:
    """Live processes with this mark or with one that continues it by `::`, and those of the sessions, but not the caller.

    A process that sets its title, as Ray's workers and agents do, overwrites the mark, but stays in its session.
    """
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    known = {session.leader: session.born for session in sessions if _is_still(*session)}
    return [
        process
        for process in others
        if _marked(process, marked, exact=True)
        or _marked(process, f"{marked}::", exact=False)
        or _in_session(process, known)
    ]


def end(find: Callable[[], list[psutil.Process]], *, grace_seconds: float, first: Collection[int] = ()) -> list[int]:
    """End all that `find` returns: SIGTERM (only to those of `first` that live, if any do), then SIGKILL after the grace.

    Returns the numbers of processes that are still there, which is empty unless the kernel cannot end one.
    """
    processes = find()
    for process in [process for process in processes if process.pid in first] or processes:
        _signal(process.terminate)
    psutil.wait_procs(processes, timeout=grace_seconds)
    deadline = time.monotonic() + KILL_SECONDS
    while processes := find():
        for process in processes:
            _signal(process.kill)
        psutil.wait_procs(processes, timeout=1)
        if time.monotonic() > deadline:
            break
    return [process.pid for process in processes]


def end_of_log(log: Path, lines: int) -> str:
    """The last lines that a process wrote.

    Raises:
        OSError: there is no such file.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _marked(process: psutil.Process, wanted: str, *, exact: bool) -> bool:
    try:
        found = process.environ().get(MARK, "")
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False
    return found == wanted if exact else found.startswith(wanted)


def _is_still(leader: int, born: float) -> bool:
    """Whether no other process can have got the leader's number since."""
    return birth(leader) in (None, born)


def _in_session(process: psutil.Process, sessions: dict[int, float]) -> bool:
    try:
        born = sessions.get(os.getsid(process.pid))
        if born is None or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return (birth(process.pid) or 0) >= born
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        return False


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return
