"""`store verify` names exactly the damaged files; `store gc` never deletes files that a run needs."""

import json
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.store.location import Location
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import MANIFEST, read_table
from roundhouse.store.verification import CUT_OFF_SECONDS, collect_garbage, find_garbage, verify

TABLE = pa.table({"id": [1, 2, 3]})


@pytest.fixture
def run(store_uri: str) -> Run:
    """Checkpoint 0, and iteration 1 with collect (second attempt; the first left a part) and validate."""
    run = open_run(parse_config({"run_id": "r", "store": store_uri}))
    checkpoint = run.begin(run.checkpoint(0), policy_version=0)
    checkpoint.write_bytes("model.safetensors", b"weights")
    start = checkpoint.commit()
    run.point_to(start)
    run.begin(run.stage(1, "collect"), policy_version=0).write_table("rollouts", TABLE)
    collect = run.begin(run.stage(1, "collect"), policy_version=0)
    collect.write_table("rollouts", TABLE)
    rollouts = collect.commit(inputs={"weights": start})
    validate = run.begin(run.stage(1, "validate"), policy_version=0)
    validate.write_table("sequences", TABLE)
    validate.commit(inputs={"rollouts": rollouts})
    return run


def store_of(run: Run) -> str:
    return run.location.uri.removesuffix("/runs/r")


def test_a_whole_store_has_no_problem(run: Run) -> None:
    run.begin(run.stage(2, "collect"), policy_version=0).write_table("rollouts", TABLE)
    found = verify(store_of(run))
    assert found.problems == []
    assert (found.manifests, found.files) == (3, 3)
    assert [uri.rsplit("/", 2)[-2:] for uri in found.unfinished] == [["000002", "collect"]]


def damage_a_file(stage: Location, file: str) -> None:
    data = stage.read(file)
    stage.write(file, data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lambda stage, file: stage.delete(file), "is missing"),
        (lambda stage, file: stage.write(file, stage.read(file)[:-3]), "bytes, committed were"),
        (damage_a_file, "has digest"),
        (lambda stage, file: stage.write(MANIFEST, stage.read(MANIFEST)[:40]), "cannot be read"),
    ],
    ids=["missing", "truncated", "one bit", "manifest"],
)
def test_planted_damage_is_named(run: Run, plant, expected: str) -> None:
    stage = run.stage(1, "validate").location
    file = next(name for name in stage.names() if name.endswith(".parquet"))
    plant(stage, file)
    problems = verify(store_of(run)).problems
    assert len(problems) == 1
    assert expected in problems[0].what
    assert problems[0].uri.startswith(stage.uri)
    assert problems[0].remedy


def test_a_changed_input_is_noticed_though_its_own_files_are_whole(run: Run) -> None:
    stage = run.stage(1, "collect")
    manifest = json.loads(stage.location.read(MANIFEST))
    stage.location.write(MANIFEST, json.dumps(manifest | {"counts": {"requested": 7}}).encode())
    problems = verify(store_of(run)).problems
    assert [problem.uri for problem in problems] == [run.stage(1, "validate").location.uri]


def test_a_checkpoint_that_retention_deleted_is_not_missed_but_a_pointer_to_it_is(run: Run) -> None:
    run.checkpoint(0).location.delete(MANIFEST)
    problems = verify(store_of(run)).problems
    assert [problem.uri.rsplit("/", 1)[-1] for problem in problems] == ["latest.json"]


def test_one_run_can_be_verified_alone_and_an_empty_store_is_told(run: Run, tmp_path: Path) -> None:
    assert verify(store_of(run), "r").manifests == 3
    with pytest.raises(StoreError, match="holds nothing"):
        verify(f"{tmp_path}/elsewhere")


def test_garbage_is_what_no_manifest_names_and_nothing_else(run: Run) -> None:
    unfinished = run.begin(run.stage(2, "collect"), policy_version=0).write_table("rollouts", TABLE)
    found = find_garbage(store_of(run))
    assert [item.name for item in found] == ["runs/r/iterations/000001/collect/rollouts-a0001-00000.parquet"]
    assert collect_garbage(store_of(run), found) == 1
    assert find_garbage(store_of(run)) == []
    assert verify(store_of(run)).problems == []
    reference = run.stage(1, "collect").reference()
    assert reference is not None
    assert read_table(reference, "rollouts").equals(TABLE)
    assert unfinished.path in run.stage(2, "collect").location.names()


def test_half_deleted_checkpoints_go_and_the_one_being_written_stays(run: Run) -> None:
    for version in (1, 2, 4):
        run.checkpoint(version).location.write("model.safetensors", b"weights")
    attempt = run.begin(run.checkpoint(3), policy_version=3)
    attempt.write_bytes("model.safetensors", b"weights")
    attempt.commit()
    names = [item.name for item in find_garbage(store_of(run))]
    assert [name for name in names if "checkpoints" in name] == [
        "runs/r/checkpoints/000001/model.safetensors",
        "runs/r/checkpoints/000002/model.safetensors",
    ]


def test_temporary_files_of_cut_off_writes_go_once_they_are_old_by_the_disks_clock(tmp_path: Path) -> None:
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    cut_off, under_way = (run.location.local_path / f".run.json.{digit * 32}" for digit in "01")
    for file in (cut_off, under_way):
        file.write_bytes(b"{")
    old = cut_off.stat().st_mtime - CUT_OFF_SECONDS - 60
    os.utime(cut_off, (old, old))
    found = find_garbage(str(tmp_path))
    assert [item.name for item in found] == [f"runs/r/{cut_off.name}"]
    collect_garbage(str(tmp_path), found)
    assert not cut_off.exists()
    assert under_way.exists(), "a write that is under way has such a file too"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"], "the mark of the clock is gone"


@pytest.mark.parametrize("verb", ["write", "create"])
def test_a_write_whose_temporary_file_somebody_deletes_is_made_all_the_same(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, deleted = Location(str(tmp_path)), []

    def plant(name: str) -> None:
        put = getattr(os, name)

        def call(temporary: Path, target: Path) -> None:
            if not deleted:
                deleted.append(temporary)
                temporary.unlink()
            put(temporary, target)
            temporary.unlink(missing_ok=True)  # and another time between the link and its own removal

        monkeypatch.setattr(os, name, call)

    plant("replace")
    plant("link")
    getattr(place, verb)("part", b"bytes")
    assert deleted
    assert place.read("part") == b"bytes"
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


def test_garbage_is_collected_beside_writers_whose_parts_all_arrive(tmp_path: Path) -> None:
    """Reproduces a `store gc --delete` that deleted files during their writing."""
    run = open_run(parse_config({"run_id": "r", "store": str(tmp_path)}))
    attempt, failed = run.begin(run.stage(1, "collect"), policy_version=0), []

    def write() -> None:
        try:
            for number in range(40):
                attempt.write_bytes(f"part-{number}", b"x" * 50_000)
        except StoreError as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        collect_garbage(str(tmp_path), find_garbage(str(tmp_path)))
    assert failed == []
    attempt.commit()
    assert verify(str(tmp_path)).problems == []


def test_garbage_is_not_guessed_beside_a_damaged_manifest(run: Run) -> None:
    run.stage(1, "collect").location.write(MANIFEST, b"{")
    with pytest.raises(StoreError, match="store verify"):
        find_garbage(store_of(run))
