import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, StoreError
from roundhouse.stages.report import report_iteration
from roundhouse.store import location, stage
from roundhouse.store.location import AlreadyExists, Location, NotFound
from roundhouse.store.run import Run, load_run, open_run, readable_runs
from roundhouse.store.stage import MANIFEST, read_file, read_manifest, read_table

TABLE = pa.table({"id": [1, 2, 3], "tokens": [[1], [2, 3], []]})


def run_in(store_uri: str, **keys: object) -> Run:
    return open_run(parse_config({"run_id": "r", "store": store_uri, **keys}))


def commit(run: Run, iteration: int = 1, kind: str = "collect"):
    attempt = run.begin(run.stage(iteration, kind), policy_version=iteration - 1)
    attempt.write_table("rollouts", TABLE)
    return attempt.commit(counts={"rows": 3})


def test_a_stage_is_complete_exactly_when_its_manifest_exists(store_uri: str) -> None:
    run = run_in(store_uri)
    stage = run.stage(1, "collect")
    attempt = run.begin(stage, policy_version=0)
    attempt.write_table("rollouts", TABLE)
    assert stage.reference() is None
    reference = attempt.commit()
    assert stage.reference() == reference
    stage.location.delete(MANIFEST)
    assert stage.reference() is None


def test_what_is_read_back_is_what_was_written(store_uri: str) -> None:
    run = run_in(store_uri)
    attempt = run.begin(run.stage(2, "collect"), policy_version=1)
    attempt.write_table("rollouts", TABLE)
    attempt.write_table("rollouts", TABLE)
    reference = attempt.commit(counts={"rows": 6}, metrics={"reward": 0.5})
    assert read_table(reference, "rollouts").equals(pa.concat_tables([TABLE, TABLE]))
    manifest = read_manifest(reference)
    assert (manifest.iteration, manifest.provenance.policy_version, manifest.metrics) == (2, 1, {"reward": 0.5})
    assert [entry.rows for entry in manifest.files] == [3, 3]


def test_of_two_writers_one_wins_and_the_other_gets_the_winners_reference(store_uri: str) -> None:
    run = run_in(store_uri)
    stage = run.stage(1, "train")
    attempts = [run.begin(stage, policy_version=0) for _ in range(4)]
    assert [attempt.number for attempt in attempts] == [1, 2, 3, 4]
    for attempt in attempts:
        attempt.write_json("metrics", {"attempt": attempt.number})
    references = []
    threads = [threading.Thread(target=lambda a=attempt: references.append(a.commit())) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({reference.digest for reference in references}) == 1
    [entry] = read_manifest(references[0]).files
    assert json.loads(read_file(references[0], entry))["attempt"] == read_manifest(references[0]).attempt


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_file_is_refused_on_read(store_uri: str, damage: str) -> None:
    reference = commit(run_in(store_uri))
    [entry] = read_manifest(reference).files
    place = Location(reference.uri)
    data = place.read(entry.path)
    place.write(entry.path, data[:-5] if damage == "truncate" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreError, match="damaged"):
        read_table(reference, "rollouts")


def test_a_changed_manifest_is_refused(store_uri: str) -> None:
    reference = commit(run_in(store_uri))
    place = Location(reference.uri)
    place.write(MANIFEST, place.read(MANIFEST).replace(b'"rows": 3', b'"rows": 4'))
    with pytest.raises(StoreError, match="digest"):
        read_manifest(reference)


def test_latest_names_the_newest_complete_checkpoint_even_when_the_pointer_is_behind(store_uri: str) -> None:
    run = run_in(store_uri)
    assert run.latest_checkpoint() is None
    references = []
    for version in range(3):
        attempt = run.begin(run.checkpoint(version), policy_version=version)
        attempt.write_bytes("model.safetensors", b"w")
        references.append(attempt.commit())
    run.point_to(references[0])
    assert run.latest_checkpoint() == references[2]
    assert run.checkpoint_versions() == [0, 1, 2]


def test_a_run_continues_under_its_configuration_and_refuses_another(store_uri: str) -> None:
    first = run_in(store_uri)
    again = run_in(store_uri, iterations=99, rollout={"concurrency": 3})
    assert again.uid == first.uid
    with pytest.raises(ConfigError, match=r"train\.optimizer\.learning_rate: 0\.0003 -> 0\.1"):
        run_in(store_uri, train={"optimizer": {"learning_rate": 0.1}})
    assert load_run(store_uri, "r").uid == first.uid


def test_a_missing_run_lists_the_runs_there_are(store_uri: str) -> None:
    run_in(store_uri)
    with pytest.raises(StoreError, match=r"Runs there: r\."):
        load_run(store_uri, "other")


def test_create_is_exclusive_and_write_replaces(store_uri: str) -> None:
    place = Location(store_uri)
    place.create("a.json", b"1")
    with pytest.raises(AlreadyExists):
        place.create("a.json", b"2")
    assert place.read("a.json") == b"1"
    place.write("a.json", b"3")
    assert place.read("a.json") == b"3"
    assert place.names() == ["a.json"]
    with pytest.raises(NotFound):
        place.read("b.json")


def test_another_clients_objects_are_seen_at_once(store_uri: str) -> None:
    reader, writer = Location(f"{store_uri}/x"), Location(f"{store_uri}/x")
    assert reader.names() == []
    writer.write("a", b"1")
    assert reader.names() == ["a"]
    assert reader.exists("a")
    writer.delete_tree()
    assert reader.names() == []


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a//b", "", ".hidden", "a/../b", "a b"])
def test_a_name_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="not a name"):
        Location(str(tmp_path)).write(name, b"")


def test_a_scheme_that_is_not_supported_is_named() -> None:
    with pytest.raises(StoreError, match="gopher"):
        Location("gopher://x/y")


def test_a_write_that_fails_leaves_the_old_object_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Location(str(tmp_path))
    place.write("a", b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(StoreError, match="disk is full"):
        place.write("a", b"new")
    monkeypatch.undo()
    assert place.read("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_rows_are_read_without_a_thread_that_outlives_the_reading(tmp_path: Path) -> None:
    """An abort at exit: "terminate called without an active exception", half of the processes that read from a file object."""
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({f"c{index}": range(2000) for index in range(20)}), path, row_group_size=100)
    program = f"""
import os
from roundhouse.store.stage import parse_parquet
before = len(os.listdir("/proc/self/task"))
rows = parse_parquet(open({str(path)!r}, "rb").read()).num_rows
print(rows, len(os.listdir("/proc/self/task")) - before)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.split()) == (0, ["2000", "0"]), ended.stderr


def test_a_run_whose_identity_leads_out_of_the_store_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(str(tmp_path))
    (tmp_path / "runs/odd").mkdir()
    (tmp_path / "runs/odd/run.json").symlink_to("/dev/zero")
    assert [each.run_id for each in readable_runs(str(tmp_path))] == [run.run_id]
    assert "run odd is left out" in caplog.text


def parquet_of(values: pa.Array | pa.ChunkedArray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"a": values}), buffer, **options)
    return buffer.getvalue()


def dictionary(rows: int, letters: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * letters]))


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_small_file_of_many_equal_values_is_refused_before_they_fill_the_memory(
    is_nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "EXPANDED_BYTES", 2**20)
    values = dictionary(100_000, 100_000)  # 10 GB
    if is_nested:
        values = pa.ListArray.from_arrays(pa.array(range(100_001), pa.int32()), values)
    data = parquet_of(values)
    assert len(data) < 100_000
    with pytest.raises(pa.ArrowInvalid, match="bytes of Parquet hold more than"):
        stage.parse_parquet(data)


def test_a_file_that_is_read_in_batches_has_the_rows_that_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "EXPANDED_BYTES", 0)
    rows = pa.array(
        [{"text": str(number) * (number % 50), "tokens": [number] * (number % 7)} for number in range(3000)]
    )
    data = parquet_of(rows, row_group_size=700)
    assert stage.parse_parquet(data).column("a").combine_chunks().equals(rows)
    assert stage.parse_parquet(parquet_of(rows.slice(0, 0))).num_rows == 0


def test_waits_of_several_threads_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(location, "time", SimpleNamespace(monotonic=lambda: now))
    waiting, before = location.waiting, location.waiting.seconds
    with waiting.counted():
        now = 2.0
        with waiting.counted():  # of another thread, for all it knows
            now = 3.0
        assert waiting.seconds - before == 3.0
    now = 10.0
    assert waiting.seconds - before == 3.0
    with waiting.counted():
        now = 11.0
    assert waiting.seconds - before == 4.0


def test_stages_and_reports_record_how_long_the_store_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(location, "time", SimpleNamespace(monotonic=lambda: next(ticks)))  # an operation takes a second
    run = run_in(str(tmp_path), iterations=2)
    for k in (1, 2):
        begun = location.waiting.seconds
        attempts = [commit(run, k, "refit"), commit(run, k)]
        report = read_manifest(report_iteration(run, k))
    stored = [read_manifest(reference).resources["store_seconds"] for reference in attempts]
    assert stored == [1.0, 1.0]
    # Since the report before: the stages' other operations too, and what the report itself reads
    assert sum(stored) < report.metrics["time/store"] <= location.waiting.seconds - begun + 2
