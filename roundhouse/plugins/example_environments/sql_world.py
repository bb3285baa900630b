"""A small SQL world: questions to be answered by a query, and changes to be made with a statement.

Invariants: a question is rewarded exactly if the rollout ends with a query that returns the reference's rows (as a
multiset) in the session's world and in three hidden ones, so that a constant does not count. A change is rewarded
exactly if the session's tables equal the reference statement's. Every reference changes something, or differs from the
query without its condition.

    Query: how many people live in Oslo?  ->  query("SELECT count(*) FROM people WHERE city = 'Oslo'") = 2  ->  the same query
    Change: delete all orders of pens.    ->  query("DELETE FROM orders WHERE item = 'pens'") = done       ->  Done.

The databases are in memory; each statement runs in a locked process with its limits, never in this process. A session
holds only the image of its database, of at most 64 KiB. A statement's end is its own fault (`sql_child` has the
limits), unless this machine gives the locked process no CPU time, or kills it: then it is an infrastructure failure, as
in `sandbox`. The locked processes start with the first statement, one per core and at most eight, and serve all
databases: a statement takes 0.3 ms of CPU there, and 30 ms in a separate process.

    database = Database(image_of(SCHEMA, {"people": [("Ada", "Oslo", 36)]}))
    await database.run("SELECT name FROM people")   ->   Result(["name"], [("Ada",)])
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, closing_text, tool
from roundhouse.environments.generated import GeneratedEnvironment, Message, calls, distinct, returns, says
from roundhouse.environments.sandbox import FROM_OUTSIDE, LockedProcess, killed, not_locked
from roundhouse.environments.sandbox_child import LOCKED
from roundhouse.plugins.example_environments.sql_child import (
    LENGTH,
    MAX_STATEMENT,
    PAGE_BYTES,
    Result,
    StatementRefused,
    execute,
    framed,
    unframed,
)

CHILD = Path(__file__).with_name("sql_child.py")
WALL_SECONDS = 15.0
"""Time limit of one statement, far above its CPU time."""
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
    """Return the answer of this thread's process, starting one if necessary."""
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


SCHEMA = """
CREATE TABLE people (name TEXT, city TEXT, age INTEGER);
CREATE TABLE orders (name TEXT, item TEXT, amount INTEGER);
"""
TABLES = ("people", "orders")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
CITIES = ("Oslo", "Rome", "Kyiv", "Lima")
ITEMS = ("pens", "cups", "hats", "maps")
ORDERS = 16
SHOWN_ROWS = 20
HIDDEN_WORLDS = 3

QUESTIONS = {
    "how many people live in {city}": "SELECT count(*) FROM people WHERE city = '{city}'",
    "who lives in {city}": "SELECT name FROM people WHERE city = '{city}'",
    "who is older than {age}": "SELECT name FROM people WHERE age > {age}",
    "which items did {name} order": "SELECT item FROM orders WHERE name = '{name}'",
    "what is the total amount of {item}": "SELECT sum(amount) FROM orders WHERE item = '{item}'",
    "what is the total amount of orders from {city}": (
        "SELECT sum(amount) FROM orders JOIN people USING (name) WHERE city = '{city}'"
    ),
}
CHANGES = {
    "delete all orders of {item}": "DELETE FROM orders WHERE item = '{item}'",
    "move {name} to {city}": "UPDATE people SET city = '{city}' WHERE name = '{name}'",
    "double the amount of orders by {name}": "UPDATE orders SET amount = 2 * amount WHERE name = '{name}'",
}


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task in world number `world`, and the statement that solves it."""

    world: int
    text: str
    statement: str
    change: bool

    @property
    def careless(self) -> str:
        """The statement without its condition."""
        return self.statement.partition(" WHERE")[0]


class SqlWorld(GeneratedEnvironment[Assignment]):
    """`worlds` worlds of eight people and sixteen orders; `changes` is the share of assignments that change data."""

    name = "sql_world"
    restoration = "replay"

    def __init__(
        self, worlds: int = 100, changes: float = 0.3, problems: int = 2000, heldout_fraction: float = 0.2
    ) -> None:
        assignments = distinct(
            lambda rng: draw(worlds, changes, rng), self.key, problems, f"sql_world with {worlds} worlds"
        )
        super().__init__(assignments, heldout_fraction)

    def key(self, problem: Assignment) -> str:
        return f"{problem.world}/{problem.statement}"

    def row(self, problem: Assignment) -> TaskRow:
        prompt = f"Tables: people(name, city, age), orders(name, item, amount). {problem.text}"
        fields = {"world": problem.world, "statement": problem.statement, "change": problem.change}
        return self.task(problem, prompt, **fields)

    async def seed_session(self, row: TaskRow) -> Database:
        return Database(world_image(int(row["world"])), writable=bool(row["change"]))

    @tool("Run one SQL statement.", sql="SQLite.")
    async def query(self, session: Database, sql: str) -> str:
        try:
            return shown(await session.run(sql))
        except StatementRefused as refusal:
            return f"error: {refusal}"

    async def verify(self, session: Database, row: TaskRow, response: dict[str, Any]) -> Verdict:
        world, statement = int(row["world"]), row["statement"]
        if row["change"]:
            return Verdict(float(await same_tables(session, changed(world, statement))))
        reply = closing_text(response) or ""
        hidden = [-HIDDEN_WORLDS * world - number for number in range(1, HIDDEN_WORLDS + 1)]
        for each in (world, *hidden):
            if not await same_rows(reply, statement, each):
                return Verdict(0.0)
        return Verdict(1.0)

    def demonstration(self, problem: Assignment, right: bool, rng: random.Random) -> Iterator[Message]:
        statement = problem.statement if right else problem.careless
        result, _ = execute(world_image(problem.world), statement, problem.change)
        yield calls("query", "call_1", sql=statement)
        yield returns("call_1", shown(result))
        yield says("Done." if problem.change else statement)


def draw(worlds: int, changes: float, rng: random.Random) -> Assignment:
    """An assignment for which the condition of its statement matters."""
    while True:
        change = rng.random() < changes
        text, statement = rng.choice(sorted((CHANGES if change else QUESTIONS).items()))
        parts = {
            "name": rng.choice(NAMES),
            "city": rng.choice(CITIES),
            "item": rng.choice(ITEMS),
            "age": rng.randint(20, 60),
        }
        opening, end = ("Change: ", ".") if change else ("Query: ", "?")
        assignment = Assignment(
            rng.randrange(worlds), f"{opening}{text.format(**parts)}{end}", statement.format(**parts), change
        )
        if _matters(assignment):
            return assignment


def _matters(assignment: Assignment) -> bool:
    world, statement = assignment.world, assignment.statement
    if assignment.change:
        after = changed(world, statement)
        return after != changed(world, assignment.careless) and after != changed(world, "SELECT 1")
    return found(world, statement) != found(world, assignment.careless)


async def same_rows(query: str, reference: str, world: int) -> bool:
    """Return whether a policy's query returns the reference's rows in a fresh world."""
    try:
        result = await Database(world_image(world)).run(query)
    except StatementRefused:
        return False
    return Counter(result.rows) == found(world, reference)


async def same_tables(database: Database, wanted: Mapping[str, Counter[tuple[Any, ...]]]) -> bool:
    """Return whether a policy's database has these rows. At most one surplus row is read."""
    try:
        for name, rows in wanted.items():
            result = await database.run(f"SELECT * FROM {name} LIMIT {rows.total() + 1}")
            if Counter(result.rows) != rows:
                return False
    except StatementRefused:  # the rows are too large to be the wanted ones
        return False
    return True


@functools.lru_cache(maxsize=256)
def found(world: int, statement: str) -> Counter[tuple[Any, ...]]:
    """Return the rows of a trusted statement in a world."""
    return Counter(execute(world_image(world), statement, writable=False)[0].rows)


@functools.lru_cache(maxsize=256)
def changed(world: int, statement: str) -> dict[str, Counter[tuple[Any, ...]]]:
    """Return the rows of a world's tables after a trusted statement."""
    _, image = execute(world_image(world), statement, writable=True)
    return {name: Counter(execute(image, f"SELECT * FROM {name}", writable=False)[0].rows) for name in TABLES}


@functools.lru_cache(maxsize=1024)
def world_image(number: int) -> bytes:
    """The database of world `number`, the same wherever it is made."""
    rng = random.Random(f"sql_world/{number}")
    people = [(name, rng.choice(CITIES), rng.randint(20, 60)) for name in NAMES]
    orders = [(rng.choice(NAMES), rng.choice(ITEMS), rng.randint(1, 20)) for _ in range(ORDERS)]
    return image_of(SCHEMA, dict(zip(TABLES, (people, orders), strict=True)))


def shown(result: Result) -> str:
    """Return a result as the policy sees it: a line per row, `done` for an empty one."""
    if not result.columns:
        return "done"
    lines = ["|".join("null" if cell is None else str(cell) for cell in row) for row in result.rows[:SHOWN_ROWS]]
    more = len(result.rows) - SHOWN_ROWS
    return "\n".join(lines + [f"{more} more rows"] * (more > 0)) or "no rows"
