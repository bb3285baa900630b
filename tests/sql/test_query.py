"""`roundhouse query` reads exactly the data in the manifests, and can only read."""

import csv
import io
import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundhouse.cli import app
from roundhouse.errors import StoreError
from roundhouse.sql.database import TABLES, QueryError, run_query
from roundhouse.stages.datasets import TaskDraw
from roundhouse.store.stage import FileEntry
from roundhouse.trajectories.schemas import rollouts_table, turns_table
from tests import fork_server
from tests.sql.stores import begin_stage, make_rollout, write_dataset, write_run


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs of two iterations, 12 rollouts in each, and a dataset of the first."""
    store = str(tmp_path_factory.mktemp("query") / "store")
    write_dataset(write_run(store, "a"), "offline", TaskDraw(1))
    write_run(store, "b", seed=1)
    return store


def rows(store: str, sql: str, **options: object) -> list[dict]:
    return run_query(store, sql, **options).to_pylist()


def test_a_query_over_all_runs_groups_and_averages(store_uri: str) -> None:
    write_run(store_uri, "a", iterations=1)
    write_run(store_uri, "b", iterations=1, seed=1)
    found = rows(
        store_uri,
        "SELECT run_id, iteration, stage, count(*) AS n, count(reward) AS rewarded FROM rollouts GROUP BY ALL ORDER BY 1",
    )
    assert [tuple(row.values()) for row in found] == [("a", 1, "collect", 12, 11), ("b", 1, "collect", 12, 11)]
    assert rows(store_uri, "SELECT count(*) AS n FROM turns WHERE run_id = 'b'") == [{"n": 22}]


def test_every_table_has_rows_and_its_columns(local: str) -> None:
    for name in TABLES:
        answer = run_query(local, f"SELECT * FROM {name}")
        assert answer.num_rows > 0, name
        assert set(TABLES[name].schema.names) <= set(answer.column_names), name


def test_datasets_of_one_iteration_join(local: str) -> None:
    [found] = rows(
        local,
        """SELECT count(*) AS n, min(trained_tokens - list_sum(loss_mask)) AS low,
                  max(trained_tokens - list_sum(loss_mask)) AS high
           FROM sequences JOIN columns USING (run_id, iteration, sequence_id)""",
    )
    assert found == {"n": 40, "low": 0, "high": 0}


def test_metrics_are_found_by_name(local: str) -> None:
    found = rows(local, "SELECT metrics['train/loss'] AS loss FROM iterations WHERE run_id = 'a' AND iteration > 0")
    assert [row["loss"] for row in found] == [0.5, 0.25]


def test_parts_that_no_manifest_names_are_not_data(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = write_run(store, "a", iterations=1)
    begin_stage(run, 1, attempts=1)  # lost: the stage is complete
    begin_stage(run, 2, attempts=2)  # interrupted
    by_iteration = "SELECT iteration, complete, count(*) AS n FROM rollouts GROUP BY ALL ORDER BY 1"
    assert [tuple(row.values()) for row in rows(store, by_iteration)] == [(1, True, 12)]
    unfinished = rows(store, by_iteration, unfinished=True)
    assert [tuple(row.values()) for row in unfinished] == [(1, True, 12), (2, False, 2)]


def test_what_shards_wrote_is_data_and_none_of_it_comes_twice(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = write_run(store, "a", iterations=1)
    stage = run.stage(2, "collect")
    attempts = [run.begin(stage, policy_version=1) for _ in range(2)]

    def write(attempt: int, shard: int, rollouts: int) -> list[FileEntry]:
        writer = stage.join(attempts[0].provenance, attempt, f"s{shard:04d}of0002")
        made = [make_rollout(0, 2, shard, sample, 1, "hm") for sample in range(rollouts)]
        return [writer.write_table("turns", turns_table(made)), writer.write_table("rollouts", rollouts_table(made))]

    write(1, 1, 1)  # lost
    write(1, 1, 2)  # lost with its driver
    for entry in write(1, 2, 4) + write(2, 1, 3):
        attempts[1].adopt(entry)
    counted = (
        "SELECT complete, count(*) AS n, count(DISTINCT rollout_id) AS ids FROM rollouts WHERE iteration = 2 GROUP BY 1"
    )
    assert rows(store, counted, unfinished=True) == [{"complete": False, "n": 7, "ids": 7}]
    attempts[1].commit()
    assert rows(store, counted) == [{"complete": True, "n": 7, "ids": 7}]


@pytest.mark.parametrize("store_uri", ["s3"], indirect=True)
@pytest.mark.parametrize("of_all_services", ["http://127.0.0.1:1", ""])
def test_rows_are_read_from_the_endpoint_of_the_store(
    store_uri: str, of_all_services: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(store_uri, "a", iterations=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", of_all_services)
    assert rows(store_uri, "SELECT count(*) AS n FROM rollouts") == [{"n": 12}]


def test_only_the_runs_asked_for_are_read(local: str) -> None:
    assert rows(local, "SELECT DISTINCT run_id FROM rollouts", runs=["b"]) == [{"run_id": "b"}]
    with pytest.raises(StoreError, match=r"No run 'c'.*Runs there: a, b"):
        rows(local, "SELECT 1 FROM rollouts", runs=["c"])


@pytest.mark.parametrize(
    "statement",
    [
        "COPY (SELECT 1) TO '{there}/new.csv'",
        "COPY rollouts TO '{there}/new.parquet'",
        "EXPORT DATABASE '{there}/new'",
        "ATTACH '{there}/new.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CREATE TABLE t AS SELECT 1",
        "SET enable_external_access = true",
        "PRAGMA enable_external_access = true",
        "SELECT * FROM read_text('{there}/secret')",
        "SELECT * FROM '{there}/secret.csv'",
        "SELECT * FROM read_parquet('{there}/*.parquet')",
        "SELECT * FROM read_csv('http://127.0.0.1:1/x.csv')",
        "SELECT * FROM glob('{there}/*')",
        "SELECT * FROM parquet_metadata('{there}/x.parquet')",
        "SELECT getenv('HOME')",
        "SELECT * FROM secret",
        "SELECT 1; COPY (SELECT 1) TO '{there}/new.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{there}/new.csv'",
    ],
)
def test_nothing_but_reading_the_tables_is_possible(local: str, tmp_path: Path, statement: str) -> None:
    secret = [{"a": "secret"}]  # a variable that DuckDB would find by its name, if it were let
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret.csv").write_text("a\nsecret\n")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(QueryError):
        run_query(local, statement.format(there=tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    assert secret


def test_errors_name_what_is_known(local: str) -> None:
    with pytest.raises(QueryError, match="Tables: rollouts, turns, sequences"):
        run_query(local, "SELECT * FROM rolouts")
    with pytest.raises(QueryError, match="rollouts: run_id, iteration, stage"):
        run_query(local, "SELECT rewards FROM rollouts")
    with pytest.raises(QueryError, match="One statement at a time; this has 2"):
        run_query(local, "SELECT 1; SELECT 2")
    with pytest.raises(QueryError, match="syntax error"):
        run_query(local, "SELEC 1")


def test_a_query_ends_in_time(local: str) -> None:
    with pytest.raises(QueryError, match=r"ended after 0\.3 s"):
        run_query(local, "SELECT count(*) FROM range(1000000000000) a WHERE hash(a) = 1", timeout_seconds=0.3)


def test_the_command_ends_in_time_also_where_the_statement_does_not_heed_it(tmp_path: Path) -> None:
    """One call of a function is not interrupted: with 20 s to take, the command took 32 s. This one would take a day."""
    (tmp_path / "runs").mkdir()
    endless = "SELECT levenshtein(repeat('a', 2000000), repeat('b', 2000000))"
    command = [sys.executable, "-c", "from roundhouse.cli import main; main()", "query", endless]
    ended = fork_server.run(
        [*command, "--store", str(tmp_path), "--timeout", "0.5"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.stderr.startswith("error: The query was ended after 0.5 s.")
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("option", ["--timeout", "--memory"])
def test_limits_of_a_query_are_finite(local: str, option: str) -> None:
    refused = CliRunner().invoke(app, ["query", "SELECT 1", "--store", local, option, "inf"])
    assert (refused.exit_code, option in refused.output) == (2, True)


def test_a_query_holds_no_more_memory_than_it_may(local: str) -> None:
    with pytest.raises(QueryError, match=r"Out of Memory.*raise --memory"):
        run_query(local, "SELECT count(*) FROM (SELECT DISTINCT hash(range) FROM range(10000000))", memory_gib=0.05)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    run = write_run(str(tmp_path / "store"), "a", iterations=1)
    run.stage(1, "collect").location.write("manifest.json", b"{")
    with pytest.raises(StoreError, match=r"collect/manifest\.json cannot be read"):
        run_query(str(tmp_path / "store"), "SELECT 1 FROM rollouts")


def test_the_command_writes_for_people_and_for_programs(local: str) -> None:
    sql = "SELECT run_id, avg(reward) AS reward, map {'a': 1.5} AS m FROM rollouts GROUP BY 1 ORDER BY 1"

    def said(*options: str) -> str:
        result = CliRunner().invoke(app, ["query", sql, "--store", local, *options])
        assert result.exit_code == 0, result.output
        return result.output

    parsed = json.loads(said("--json"))
    assert [row["run_id"] for row in parsed] == ["a", "b"]
    assert parsed[0]["m"] == {"a": 1.5}
    table = list(csv.DictReader(io.StringIO(said("--csv"))))
    assert [float(row["reward"]) for row in table] == [row["reward"] for row in parsed]
    assert "1 of 2 rows" in said("--limit", "1")


def test_collected_datasets_have_tables_of_their_own(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = write_run(store, "a", iterations=1)
    for draw in (1, 2):
        write_dataset(run, "offline", TaskDraw(draw), version=draw - 1)
    found = rows(store, "SELECT version, run_id, rollouts, metrics['reward/mean'] r FROM datasets ORDER BY version")
    assert [row["version"] for row in found] == ["v000000-i000001", "v000001-i000002"]
    assert {row["run_id"] for row in found} == {"a"}
    counted = "SELECT dataset, version, count(*) AS n, avg(reward) AS r FROM dataset_rollouts GROUP BY ALL ORDER BY 2"
    counts = rows(store, counted)
    assert [(row["dataset"], row["n"]) for row in counts] == [("offline", 8)] * 2
    assert [row["r"] for row in counts] == [row["r"] for row in found]
    turns = rows(store, "SELECT count(*) AS n FROM dataset_turns JOIN dataset_rollouts USING (version, rollout_id)")
    assert turns == [{"n": 32}]
    assert rows(store, "SELECT count(*) AS n FROM rollouts") == [{"n": 12}], "a run's own, as ever"
