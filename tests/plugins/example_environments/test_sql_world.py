import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from roundhouse.environments.sandbox import LockedProcess, SandboxKilled, SandboxOverloaded, SandboxUnavailable
from roundhouse.plugins.example_environments import sql_world
from roundhouse.plugins.example_environments.sql_child import HEAP_BYTES, MAX_ROWS, StatementRefused, execute
from roundhouse.plugins.example_environments.sql_world import (
    CITIES,
    SCHEMA,
    TABLES,
    Assignment,
    Database,
    SqlWorld,
    world_image,
)
from tests.gym.environments.playing import judge, message

WORLD = SqlWorld(worlds=20, problems=100)
OSLO = "SELECT name FROM people WHERE city = 'Oslo'"


def open_world(number: int, writable: bool = False) -> Database:
    return Database(world_image(number), writable)


async def contents(database: Database) -> list[Any]:
    return [(await database.run(f"SELECT * FROM {name}")).rows for name in TABLES]


def row_of(statement: str, change: bool = False):
    return WORLD.row(Assignment(3, "", statement, change))


async def test_another_query_with_the_same_rows_in_any_order_is_rewarded() -> None:
    for reply in (OSLO, OSLO + ";", "SELECT p.name FROM people p WHERE city LIKE 'oslo' ORDER BY age DESC"):
        assert (await judge(WORLD, row_of(OSLO), message(reply))).reward == 1.0


async def test_a_constant_that_fits_this_world_alone_is_not_rewarded() -> None:
    count = "SELECT count(*) FROM people WHERE city = 'Oslo'"
    here = execute(world_image(3), count, writable=False)[0].rows[0][0]
    assert (await judge(WORLD, row_of(count), message(count))).reward == 1.0
    assert (await judge(WORLD, row_of(count), message(f"SELECT {here}"))).reward == 0.0


@pytest.mark.parametrize("reply", ["", "SELECT", OSLO + " LIMIT 0", OSLO + "; " + OSLO, "DELETE FROM people", "Oslo"])
async def test_other_replies_are_not_rewarded(reply: str) -> None:
    assert (await judge(WORLD, row_of(OSLO), message(reply))).reward == 0.0


async def test_a_change_is_judged_by_the_tables_that_it_leaves() -> None:
    row = row_of("DELETE FROM orders WHERE item = 'pens'", change=True)
    query = WORLD.tools()["query"].call
    for statement, reward in (
        ("DELETE FROM orders WHERE item IN ('pens')", 1.0),
        ("DELETE FROM orders", 0.0),
        ("SELECT 1", 0.0),
    ):
        session = await WORLD.seed_session(row)
        await query(session, statement)
        assert (await WORLD.verify(session, row, {"output": [message("Done.")]})).reward == reward


FORBIDDEN = [
    "ATTACH 'x.db' AS x",
    "ATTACH ':memory:' AS x",
    "PRAGMA writable_schema = 1",
    "PRAGMA table_info(people)",
    "DROP TABLE people",
    "CREATE TABLE x (y)",
    "CREATE TEMP TABLE x (y)",
    "VACUUM INTO '/tmp/x'",
    "ALTER TABLE people ADD x",
    "BEGIN",
    "SELECT load_extension('x')",
    "SELECT * FROM pragma_table_info('people')",
    "DETACH main",
    "UPDATE sqlite_master SET sql = ''",
    "CREATE TRIGGER t AFTER INSERT ON people BEGIN SELECT 1; END",
    "ANALYZE",
]


@pytest.mark.parametrize("statement", FORBIDDEN)
async def test_files_settings_and_the_schema_are_out_of_reach_even_where_data_may_change(statement: str) -> None:
    database = open_world(0, writable=True)
    before = await contents(database)
    with pytest.raises(StatementRefused):
        await database.run(statement)
    assert await contents(database) == before


@pytest.mark.parametrize(
    "statement", ["DELETE FROM people", "INSERT INTO people VALUES ('a', 'b', 1)", "UPDATE people SET age = 1"]
)
async def test_a_question_cannot_change_data(statement: str) -> None:
    with pytest.raises(StatementRefused):
        await open_world(0).run(statement)


COUNT_FOR_EVER = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT "


@pytest.mark.parametrize(
    "statement",
    [
        COUNT_FOR_EVER + "count(*) FROM n",
        COUNT_FOR_EVER + "x FROM n",
        "SELECT zeroblob(1000000000)",
        COUNT_FOR_EVER + "group_concat(x) FROM n",
        "SELECT * FROM people a, people b, people c, people d",
        "SELECT " + "1 + " * 2000 + "1",
    ],
)
async def test_endless_and_huge_statements_are_ended_without_blocking_the_event_loop(statement: str) -> None:
    database, seconds = open_world(0), []
    await database.run("SELECT count(*) FROM people")  # starts its process
    for each in ("SELECT * FROM people", statement):
        begun = time.thread_time()
        with pytest.raises(StatementRefused) if each == statement else contextlib.nullcontext():
            await database.run(each)
        seconds.append(time.thread_time() - begun)
    assert seconds[1] < 50 * seconds[0]
    assert (await database.run("SELECT count(*) FROM people")).rows == [(8,)]


async def test_the_tool_shows_rows_nulls_and_errors_as_text() -> None:
    session = open_world(0)
    query = WORLD.tools()["query"].call
    assert await query(session, "SELECT 'a', NULL, 3") == "a|null|3"
    assert await query(session, "SELECT 1 WHERE 0") == "no rows"
    assert (await query(session, "SELECT nope FROM people")) == "error: no such column: nope"
    assert (await query(session, "SELECT 1 FROM people, orders")).endswith("\n108 more rows")
    assert (
        await query(session, f"SELECT 1 FROM people a, people b, people c LIMIT {MAX_ROWS + 1}")
        == "error: more than 200 rows"
    )


async def test_sessions_have_tables_of_their_own() -> None:
    first, second = open_world(1, writable=True), open_world(1, writable=True)
    before = await contents(second)
    await asyncio.gather(*[first.run("DELETE FROM orders"), second.run("SELECT 1")])
    assert await contents(second) == before != await contents(first)


async def test_a_statement_over_its_steps_does_not_disturb_the_next() -> None:
    database = Database(sql_world.image_of(SCHEMA, {"people": [("Ada", CITIES[0], 3)]}))
    with pytest.raises(StatementRefused, match="interrupted"):
        await database.run(COUNT_FOR_EVER + "count(*) FROM n")
    assert (await database.run("SELECT * FROM people")).rows == [("Ada", "Oslo", 3)]


async def test_every_value_of_sqlite_arrives_as_it_is() -> None:
    statement = "SELECT 1, 1.0, 9e999, x'00ff', NULL, 'ü😀', -9223372036854775808, '{\"blob\": \"AA==\"}'"
    result = await open_world(0).run(statement)
    assert result.rows == execute(world_image(0), statement, writable=False)[0].rows
    assert [type(cell) for cell in result.rows[0]] == [int, float, float, bytes, type(None), str, int, str]


# What a statement may cost ------------------------------------------------------------------------------------------

COUNTED = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT {})"
PLANS = "WITH a AS (SELECT 1)" + "".join(
    f", {name} AS (SELECT 1 FROM {last}, {last} x, {last} y, {last} z)"
    for last, name in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)
LARGE = {
    "kept in the table": "INSERT INTO people " + COUNTED.format(25_000) + " SELECT zeroblob(18000), 1, 1 FROM c",
    "kept aside": COUNTED.format(120_000)
    + ", d AS MATERIALIZED (SELECT zeroblob(19000) || n x FROM c) SELECT count(*) FROM d",
    "sorted": COUNTED.format(120_000) + " SELECT count(*) OVER (ORDER BY zeroblob(19000) || n) FROM c",
    "in the result": COUNTED.format(200) + " SELECT zeroblob(19000), zeroblob(19000), zeroblob(19000) FROM c",
    "in the plan": PLANS + " SELECT count(*) FROM m",
}
"""Each took from 0.5 to 1.9 GiB of memory, or of temporary files, or would not have ended."""


@pytest.mark.parametrize("statement", LARGE.values(), ids=LARGE)
async def test_no_statement_takes_much_memory_or_any_file(statement: str) -> None:
    session = open_world(0, writable=True)
    before, here = await contents(session), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4):
        with pytest.raises(StatementRefused):
            await session.run(statement)
    assert await contents(session) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - here < 50 * 1024
    for process in _processes():
        assert int(_status(process)["VmHWM"].split()[0]) * 1024 < 3 * HEAP_BYTES
        assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]


async def test_a_table_that_was_filled_to_its_limit_is_judged_at_once() -> None:
    """Reading back 100,000 rows took a minute of the event loop."""
    row = row_of("DELETE FROM orders WHERE item = 'pens'", change=True)
    session = await WORLD.seed_session(row)
    rows = 64_000
    while rows:
        with contextlib.suppress(StatementRefused):
            await session.run("INSERT INTO orders " + COUNTED.format(rows) + " SELECT NULL, NULL, NULL FROM c")
            continue
        rows //= 2
    assert (await session.run("SELECT count(*) > 4000 FROM orders")).rows == [(1,)]
    seconds = []
    for each in (await WORLD.seed_session(row), session):
        begun = time.thread_time()
        assert (await WORLD.verify(each, row, {"output": []})).reward == 0.0
        seconds.append(time.thread_time() - begun)
    assert seconds[1] < 20 * seconds[0], "4000 rows, and the few of a new session"


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(signal.SIGPROF, StatementRefused), (signal.SIGKILL, SandboxKilled), (signal.SIGSTOP, SandboxOverloaded)],
    ids=["its timer", "the kernel for want of memory", "a machine without CPU time"],
)
async def test_only_what_its_own_timer_ends_is_the_statements_doing(
    number: signal.Signals, outcome: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer bounds planning, and instructions that are slow in themselves."""

    def write_and_signal(process: LockedProcess, data: bytes, deadline: float) -> None:
        inside = psutil.Process(process._process.pid)
        inside.suspend()
        write(process, data, deadline)
        inside.send_signal(number)
        if number != signal.SIGSTOP:
            inside.resume()

    write = LockedProcess.write
    with monkeypatch.context() as patched:
        patched.setattr(LockedProcess, "write", write_and_signal)
        if number == signal.SIGSTOP:
            patched.setattr(sql_world, "WALL_SECONDS", 1.0)
        with pytest.raises(outcome):
            await open_world(0).run("SELECT 1")
    assert (await open_world(0).run("SELECT 1")).rows == [(1,)]


def test_where_no_process_can_be_locked_no_statement_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for process in _processes():
        process.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxUnavailable):
        asyncio.run(open_world(0).run("SELECT 1"))


def _processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "sql_child" in Path(f"/proc/{child.pid}/cmdline").read_text()]


def _status(process: psutil.Process) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
