import asyncio
import time

import pytest
from playing import judge, message

from roundhouse.gym.environments.sql_engine import MAX_ROWS, Database, Refused
from roundhouse.gym.environments.sql_world import CITIES, SCHEMA, Assignment, SqlWorld, open_world

WORLD = SqlWorld(worlds=20, problems=100)
OSLO = "SELECT name FROM people WHERE city = 'Oslo'"


def row_of(statement: str, change: bool = False):
    return WORLD.row(Assignment(3, "", statement, change))


async def test_another_query_with_the_same_rows_in_any_order_is_rewarded() -> None:
    for reply in (OSLO, OSLO + ";", "SELECT p.name FROM people p WHERE city LIKE 'oslo' ORDER BY age DESC"):
        assert (await judge(WORLD, row_of(OSLO), message(reply))).reward == 1.0


async def test_a_constant_that_fits_this_world_alone_is_not_rewarded() -> None:
    count = "SELECT count(*) FROM people WHERE city = 'Oslo'"
    here = open_world(3).run_blocking(count).rows[0][0]
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
        await WORLD.close_session(session)


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
    before = database.contents()
    with pytest.raises(Refused):
        await database.run(statement)
    assert database.contents() == before


@pytest.mark.parametrize(
    "statement", ["DELETE FROM people", "INSERT INTO people VALUES ('a', 'b', 1)", "UPDATE people SET age = 1"]
)
async def test_a_question_cannot_change_data(statement: str) -> None:
    with pytest.raises(Refused):
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
    database = open_world(0)
    begun = time.thread_time()
    with pytest.raises(Refused):
        await database.run(statement)
    assert time.thread_time() - begun < 0.05
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
    before = second.contents()
    await asyncio.gather(*[first.run("DELETE FROM orders"), second.run("SELECT 1")])
    assert second.contents() == before != first.contents()


def test_a_statement_over_its_steps_does_not_disturb_the_next() -> None:
    database = Database(SCHEMA, {"people": [("Ada", CITIES[0], 3)]})
    with pytest.raises(Refused, match="interrupted"):
        database.run_blocking(COUNT_FOR_EVER + "count(*) FROM n")
    assert database.contents() == {"people": [("Ada", "Oslo", 3)]}
