"""SQLite for one untrusted statement at a time; as a script, the inside of the locked process for policies' statements.

Invariants: a statement ends after `STEPS` instructions of SQLite's machine, so it ends the same way on every computer.
No text, blob, statement, result or database exceeds its limit; nothing is written to a disk. Only reads of tables are
allowed, and with `writable` also INSERT, UPDATE and DELETE, so files (ATTACH), settings (PRAGMA) and the schema are out
of reach. A refused statement changes nothing.

SQLite bounds neither the work nor the memory of planning a statement (450 characters of WITH clauses name 10^7 tables),
nor the memory of intermediate results. The process does: `main` limits SQLite's memory, locks the process, and bounds
the CPU time of each statement by a timer, which ends it with a signal.

Requests on stdin and answers on stdout are JSON after their length (`framed`); blobs and databases are in base64.
"""

import base64
import json
import os
import signal
import sqlite3
import struct
import sys
from typing import Any, NamedTuple

STEPS = 2_000_000
"""Instructions of one statement; about 50 ms of one core."""
STEPS_BETWEEN_CHECKS = 10_000
MAX_ROWS = 200
MAX_BYTES = 50_000
"""Limit of the texts and blobs of a result."""
MAX_TEXT = 20_000
MAX_STATEMENT = 2_000
PAGE_BYTES, MAX_PAGES = 1024, 64
HEAP_BYTES = 32 * 2**20
"""Memory limit of SQLite in the locked process."""
MEMORY_BYTES = 256 * 2**20
CPU_SECONDS = 2.0
SET_TIMER = (38, 103)
"""The system call `setitimer`, as in `sandbox_child.CALLS`."""
LENGTH = struct.Struct(">I")

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_WRITES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_TEXT,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_STATEMENT,
    sqlite3.SQLITE_LIMIT_COLUMN: 32,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 50,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 8,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
}


class StatementRefused(Exception):
    """The statement failed or was not allowed; the text is for the policy."""


class Result(NamedTuple):
    """Result of a statement."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def execute(image: bytes, statement: str, writable: bool) -> tuple[Result, bytes]:
    """Run one statement on a database; its result, and the database after it.

    Args:
        image: the database, as SQLite serializes it.

    Raises:
        StatementRefused: it failed, is not allowed, takes too long or returns too much.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.deserialize(image)
        connection.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
        connection.execute("PRAGMA temp_store = MEMORY")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        allowed = _READS | (_WRITES if writable else set())

        def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
            if action not in allowed or (action in _WRITES and first not in tables):
                return sqlite3.SQLITE_DENY
            forbidden = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in (
                "load_extension",
                "fts3_tokenizer",
            )
            return sqlite3.SQLITE_DENY if forbidden else sqlite3.SQLITE_OK

        connection.set_authorizer(authorize)
        checks = iter(range(STEPS // STEPS_BETWEEN_CHECKS))
        connection.set_progress_handler(lambda: next(checks, None) is None, STEPS_BETWEEN_CHECKS)
        cursor = connection.execute(statement)
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in cursor:
            rows.append(row)
            size += sum(len(cell) for cell in row if isinstance(cell, (str, bytes)))
            if len(rows) > MAX_ROWS:
                raise StatementRefused(f"more than {MAX_ROWS} rows")
            if size > MAX_BYTES:
                raise StatementRefused(f"more than {MAX_BYTES} bytes")
        result = Result([column[0] for column in cursor.description or ()], rows)
        if not writable:
            return result, image
        connection.set_authorizer(None)
        return result, connection.serialize()
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        raise StatementRefused(str(error) or "out of memory") from error
    finally:
        connection.close()


def framed(message: dict[str, Any]) -> bytes:
    """A message as it goes through a pipe."""
    body = json.dumps(message, default=lambda blob: {"blob": base64.b64encode(blob).decode()}).encode()
    return LENGTH.pack(len(body)) + body


def unframed(body: bytes) -> dict[str, Any]:
    """The message of a frame, without its length."""
    return json.loads(body, object_hook=lambda item: base64.b64decode(item["blob"]) if "blob" in item else item)


def serve() -> None:
    """Answer requests until stdin ends."""
    requests = sys.stdin.buffer
    while header := requests.read(LENGTH.size):
        request = unframed(requests.read(*LENGTH.unpack(header)))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            result, image = execute(**request)
            answer = {"columns": result.columns, "rows": result.rows}
            if request["writable"]:
                answer["image"] = image
        except StatementRefused as refusal:
            answer = {"refused": str(refusal)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(1, framed(answer))


def main() -> None:
    sys.path.append(os.path.join(os.path.dirname(__file__), "../../environments"))
    from sandbox_child import LOCKED, NO_LOCK, lock

    connection = sqlite3.connect(":memory:")
    connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
    connection.close()
    try:
        lock(10**9, MEMORY_BYTES, 0, [SET_TIMER])
    except (OSError, ValueError):
        os._exit(NO_LOCK)
    os.write(1, LOCKED)
    serve()


if __name__ == "__main__":
    main()
