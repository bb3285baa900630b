"""SQLite for untrusted statements: in memory, bounded in work and size, and closed to everything but the tables.

Invariants: a statement ends after `STEPS` instructions of SQLite's machine, so the same statement ends the same way on every
computer; no text, blob or statement is longer than its limit; only reads of tables are allowed, and with `writable` also
INSERT, UPDATE and DELETE, so that neither files (ATTACH), nor settings (PRAGMA), nor the schema can be reached or changed.

    database = Database(SCHEMA, {"people": [("Ada", "Oslo", 36)]})
    await database.run("SELECT name FROM people")   ->   Result(["name"], [("Ada",)])
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEPS = 2_000_000
"""Instructions of one statement; about 50 ms of one core."""
STEPS_BETWEEN_CHECKS = 10_000
MAX_ROWS = 200
MAX_TEXT = 20_000
MAX_STATEMENT = 2_000
SECONDS = 5.0
"""A last resort beside STEPS, for instructions that are slow in themselves."""

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


class Refused(Exception):
    """The statement failed or was not allowed; the text is for the policy."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement returned."""

    columns: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)


class Database:
    """One database in memory; statements run one after another, off the event loop."""

    def __init__(self, schema: str, tables: Mapping[str, Sequence[tuple[Any, ...]]], writable: bool = False) -> None:
        # Statements run in whichever thread is free; the lock keeps it to one at a time.
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._lock = asyncio.Lock()
        self._connection.executescript(schema)
        for name, rows in tables.items():
            places = ", ".join("?" * len(rows[0]))
            self._connection.executemany(f"INSERT INTO {name} VALUES ({places})", rows)
        self._tables = list(tables)
        self._allowed = _READS | (_WRITES if writable else set())
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_authorizer(self._authorize)
        self._steps = 0
        self._connection.set_progress_handler(self._out_of_steps, STEPS_BETWEEN_CHECKS)

    async def run(self, statement: str) -> Result:
        """Run one statement.

        Raises:
            Refused: it failed, is not allowed, takes too long or returns too much.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(SECONDS):
                    return await asyncio.to_thread(self.run_blocking, statement)
            except TimeoutError as error:
                self._connection.interrupt()
                raise Refused("interrupted") from error

    def run_blocking(self, statement: str) -> Result:
        """As `run`, in the caller's thread."""
        self._steps = 0
        try:
            cursor = self._connection.execute(statement)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            raise Refused(str(error)) from error
        if len(rows) > MAX_ROWS:
            raise Refused(f"more than {MAX_ROWS} rows")
        return Result([column[0] for column in cursor.description or ()], rows)

    def contents(self) -> dict[str, list[tuple[Any, ...]]]:
        """All rows of all tables, sorted."""
        self._steps = 0
        return {name: sorted(self._connection.execute(f"SELECT * FROM {name}"), key=repr) for name in self._tables}

    def close(self) -> None:
        self._connection.close()

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action not in self._allowed or (action in _WRITES and first not in self._tables):
            return sqlite3.SQLITE_DENY
        forbidden = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in ("load_extension", "fts3_tokenizer")
        return sqlite3.SQLITE_DENY if forbidden else sqlite3.SQLITE_OK

    def _out_of_steps(self) -> bool:
        self._steps += STEPS_BETWEEN_CHECKS
        return self._steps > STEPS
