"""A group of child processes that live and end together.

Invariant: after `close`, and after this process has ended in any way, SIGKILL included, no process of the group is left,
however deep it was started: all carry the group's mark in their environment or are in the session of one of its children, and a
reaper waits for this process's end.

    children = Children(Path("logs"))
    weather = children.start("weather", ["python", "app.py"], directory, environment)
    children.ended()            those that are gone, each with its exit code and the end of its log
    await children.close([["weather"]])

Children have sessions of their own: Ctrl-C reaches this process alone, which then ends them in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roundhouse.infra import processes

GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
REAPER_GRACE_SECONDS = 5.0
"""The same after this process has ended without `close`."""
TAIL_LINES = 30


@dataclass(slots=True)
class Child:
    """One process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    started_at: float = field(default_factory=time.time)

    def tail(self) -> str:
        """The end of its output."""
        return processes.end_of_log(self.log, TAIL_LINES)


class Children:
    """The group. Start children from the main thread: on Linux the kernel ties them to the thread that started them."""

    def __init__(self, logs: Path, grace_seconds: float = GRACE_SECONDS) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._grace = grace_seconds
        self._mark = f"children-{uuid.uuid4().hex}"
        self._children: dict[str, Child] = {}
        self._sessions: dict[str, processes.Session] = {}
        """Of the children of each name, the last one's."""
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "roundhouse.infra.children", self._mark],
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
                [sys.executable, "-P", "-m", "roundhouse.infra.die_with_parent", str(os.getpid()), *command],
                cwd=directory,
                env={**environment, processes.MARK: f"{self._mark}::{name}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = self._children[name] = Child(name, process, path)
        session = self._sessions[name] = processes.Session.of(process.pid)
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{session.leader} {session.born}\n".encode())
        self._reaper.stdin.flush()
        return child

    def ended(self) -> list[Child]:
        """Those that have ended by themselves."""
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
        return await asyncio.to_thread(
            processes.end, lambda: processes.carrying(mark, sessions), grace_seconds=self._grace
        )


def reap(mark: str) -> None:
    """The reaper, `python -m roundhouse.infra.children <mark>` with a pipe from its parent as stdin: when the pipe closes,
    however the parent ended, end each process that carries the mark or is in a session that the pipe told of, a line each.
    Ctrl-C does not reach it: its session is its own."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    told = [line.split() for line in sys.stdin]
    sessions = [processes.Session(int(leader), float(born)) for leader, born in told]
    processes.end(lambda: processes.carrying(mark, sessions), grace_seconds=REAPER_GRACE_SECONDS)


if __name__ == "__main__":
    reap(sys.argv[1])
