"""Finding and ending every process of a service or of a group of children, however deep it was started.

Invariant: a process belongs to a service when its environment carries the service's mark, or when it is in the session that
the service was started in. Both are inherited; a process has to shed both to escape. The caller itself never belongs.
A child of `Children` has a guard as its parent (`roundhouse.die_with_parent`), from which no process of it can detach.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from roundhouse.die_with_parent import GUARD
from roundhouse.infra.regular_files import open_regular
from roundhouse.infra.state import StateDirectory
from roundhouse.store.process_identity import birth, boot_id

MARK = "ROUNDHOUSE_SERVICE_OF"
"""Environment variable of every process of a service: `<state directory>::<service>`."""
KILL_SECONDS = 10.0
TAIL_BYTES = 20_000
"""Most that is read of a log's end."""
GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
REAPER_GRACE_SECONDS = 5.0
"""The same after this process has ended without `close`."""
TAIL_LINES = 30


class Session(NamedTuple):
    """A session of processes that was led by one of our processes."""

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
    prefix = mark(state, service) if service else f"{state.path}::"
    result = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        if _marked(process, prefix, exact=service is not None) or _in_session(process, sessions):
            result.append(process)
    return result


def carrying(marked: str, sessions: Iterable[Session] = ()) -> list[psutil.Process]:
    """Return live processes with this mark or its extension by `::`, those of the sessions, and all that descend
    from these, without the caller.

    A process that sets its title, as Ray's workers and agents do, overwrites the mark, but stays in its session.
    """
    others = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    known = {session.leader: session.born for session in sessions if _is_still(*session)}
    members = [
        process
        for process in others
        if _marked(process, marked, exact=True)
        or _marked(process, f"{marked}::", exact=False)
        or _in_session(process, known)
    ]
    return members + _descendants(members, others) if members else []


def _descendants(members: list[psutil.Process], others: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes among `others` that descend from members, without these."""
    children: dict[int, list[psutil.Process]] = {}
    for process in others:
        try:
            children.setdefault(process.ppid(), []).append(process)
        except psutil.NoSuchProcess:
            continue
    numbers, waiting, result = {member.pid for member in members}, list(members), []
    while waiting:
        for child in children.get(waiting.pop().pid, []):
            if child.pid not in numbers:
                numbers.add(child.pid)
                result.append(child)
                waiting.append(child)
    return result


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
    """Return the last lines of a process's log. The process may have replaced its log.

    Raises:
        OSError: the file does not exist, or is not a regular one.
    """
    with open_regular(log) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return "\n".join(file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-lines:])


def _marked(process: psutil.Process, wanted: str, *, exact: bool) -> bool:
    try:
        value = process.environ().get(MARK, "")
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False
    return value == wanted if exact else value.startswith(wanted)


def _is_still(leader: int, born: float) -> bool:
    """Return whether the leader's process number cannot have been reused since."""
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


@dataclass(slots=True)
class Child:
    """One process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    started_at: float = field(default_factory=time.time)

    def tail(self) -> str:
        """The end of its output, or why that cannot be read."""
        try:
            return end_of_log(self.log, TAIL_LINES)
        except OSError as error:
            return f"(its log cannot be read: {error})"


class Children:
    """Child processes that live and end together. Start them from the main thread: on Linux the kernel ties them to the
    starting thread.

    Invariant: after `close`, and after any end of this process, even by SIGKILL, no process of the group is left,
    however deep it was started: all descend from the guard of a child, carry the group's mark or are in the session of
    a child, and a reaper waits for this process's end. Children have separate sessions: Ctrl-C reaches only this
    process, which then ends them in order.

        children = Children(Path("logs"))
        weather = children.start("weather", ["python", "app.py"], directory, environment)
        children.ended()            ended children, each with its exit code and the end of its log
        await children.close([["weather"]])
    """

    def __init__(self, logs: Path, grace_seconds: float = GRACE_SECONDS) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._grace = grace_seconds
        self._mark = f"children-{uuid.uuid4().hex}"
        self._children: dict[str, Child] = {}
        self._sessions: dict[str, Session] = {}
        """Session of the last child of each name."""
        self._reaper = subprocess.Popen(
            [sys.executable, "-P", "-m", "roundhouse.infra.processes", self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def all(self) -> list[Child]:
        return list(self._children.values())

    def log(self, name: str) -> Path:
        return self._logs / f"{name.replace('/', '_')}.log"

    def start(self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Child:
        """Start a process; its output is appended to its log.

        Raises:
            OSError: it cannot be started.
        """
        path = self.log(name)
        with path.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "roundhouse.die_with_parent", str(os.getpid()), GUARD, *command],
                cwd=directory,
                env={**environment, MARK: f"{self._mark}::{name}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = self._children[name] = Child(name, process, path)
        session = self._sessions[name] = Session.of(process.pid)
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{session.leader} {session.born}\n".encode())
        self._reaper.stdin.flush()
        return child

    def ended(self) -> list[Child]:
        """Return children that ended by themselves."""
        return [child for child in self.all if child.process.poll() is not None]

    async def end(self, name: str) -> None:
        """End one and whatever it started; nothing of it is left but its log."""
        await self._end(name)
        if (child := self._children.pop(name, None)) is not None:
            child.process.poll()

    async def close(self, order: Sequence[Sequence[str]] = ()) -> list[int]:
        """End all: the names of `order` group by group, then the rest, then whatever carries the mark.

        Returns the numbers of processes that the kernel cannot end; mostly none.
        """
        for names in order:
            await asyncio.gather(*(self._end(name) for name in names if name in self._children))
        left = await self._end(None)
        for child in self.all:
            child.process.poll()
        self._children.clear()
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()
        await asyncio.to_thread(self._reaper.wait)
        return left

    async def _end(self, name: str | None) -> list[int]:
        mark = self._mark if name is None else f"{self._mark}::{name}"
        sessions = [session for of, session in self._sessions.items() if name in (None, of)]
        return await asyncio.to_thread(end, lambda: carrying(mark, sessions), grace_seconds=self._grace)


def reap(mark: str) -> None:
    """Run the reaper, `python -m roundhouse.infra.processes <mark>` with a pipe from its parent as stdin: when the pipe
    closes, end each process that carries the mark or is in a session named in the pipe, one per line. Its session is
    separate, so Ctrl-C does not reach it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    lines = [line.split() for line in sys.stdin]
    sessions = [Session(int(leader), float(born)) for leader, born in lines]
    end(lambda: carrying(mark, sessions), grace_seconds=REAPER_GRACE_SECONDS)


if __name__ == "__main__":
    reap(sys.argv[1])
