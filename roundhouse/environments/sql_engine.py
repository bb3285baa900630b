"""Databases in memory whose statements come from a policy: each runs in a locked process, with what bounds it there.

Invariants: no statement of a policy is planned or run in this process, nor on its event loop; a session holds nothing but the
image of its database, of at most 64 KiB. How a statement ends is the statement's doing (`sql_child` has the limits), except
where this machine gives the locked process no CPU time, or something outside kills it: that is an infrastructure failure, as in
`sandbox`. The locked processes start with the first statement, one for each core and no more than eight, and serve all
databases in turn: a statement costs 0.3 ms of CPU time there, and would cost 30 ms in a process of its own.

    database = Database(image_of(SCHEMA, {"people": [("Ada", "Oslo", 36)]}))
    await database.run("SELECT name FROM people")   ->   Result(["name"], [("Ada",)])
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sqlite3
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from roundhouse.environments.sandbox import FROM_OUTSIDE, LockedProcess, killed, not_locked
from roundhouse.environments.sandbox_child import LOCKED
from roundhouse.environments.sql_child import (
    LENGTH,
    MAX_STATEMENT,
    PAGE_BYTES,
    Result,
    StatementRefused,
    framed,
    unframed,
)

CHILD = Path(__file__).with_name("sql_child.py")
WALL_SECONDS = 15.0
"""Of one statement; one that gets its CPU time ends long before."""
_own = threading.local()
"""`process`: the locked process of a thread."""


class Database:
    """One database; its statements run one after another."""

    def __init__(self, image: bytes, writable: bool = False) -> None:
        self._image = image
        self._writable = writable
        self._lock = asyncio.Lock()

    async def run(self, statement: str) -> Result:
        """Run one statement of a policy.

        Raises:
            StatementRefused: it failed, is not allowed, takes too long or returns too much.
            SandboxUnavailable, SandboxOverloaded, SandboxKilled
        """
        if len(statement) > MAX_STATEMENT:
            raise StatementRefused(f"a statement has at most {MAX_STATEMENT} characters")
        request = {"statement": statement, "writable": self._writable}
        async with self._lock:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(_threads(), _answer, request | {"image": self._image})
            if "refused" in answer:
                raise StatementRefused(answer["refused"])
            self._image = answer.get("image", self._image)
            return Result(answer["columns"], [tuple(row) for row in answer["rows"]])


def image_of(schema: str, tables: Mapping[str, Sequence[tuple[Any, ...]]]) -> bytes:
    """A database with these tables, as SQLite serializes it."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.executescript(schema)
        for name, rows in tables.items():
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        return connection.serialize()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), thread_name_prefix="sql")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of this thread's process, which is started where it has none (any more)."""
    deadline = time.monotonic() + WALL_SECONDS
    process: LockedProcess | None = getattr(_own, "process", None)
    if process is None or process.ended:
        process = _own.process = _started(deadline)
    try:
        process.write(framed(request), deadline)
        header = process.read(LENGTH.size, deadline)
        if len(header) == LENGTH.size:
            (size,) = LENGTH.unpack(header)
            body = process.read(size, deadline)
            if len(body) == size:
                return unframed(body)
        status, _ = process.wait(deadline)
    except BaseException:
        process.kill()
        raise
    if -status in FROM_OUTSIDE:
        raise killed(status)
    return {"refused": "interrupted"}


def _started(deadline: float) -> LockedProcess:
    process = LockedProcess(CHILD, subprocess.PIPE)
    try:
        if process.read(len(LOCKED), deadline) == LOCKED:
            return process
        raise not_locked(process.wait(deadline)[0])
    except BaseException:
        process.kill()
        raise
