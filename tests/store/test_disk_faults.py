"""A full disk, a hostile name, a link, a clock that jumps: existing data stays intact, and the error names the remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import ValidationError

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DataError, StoreError
from roundhouse.store import disk
from roundhouse.store.directories import local_directory
from roundhouse.store.lineage import read_identity
from roundhouse.store.location import Location, file_digest
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import MANIFEST, FileEntry, Manifest, Reference, read_manifest, read_table, sha256
from roundhouse.store.verification import find_garbage, verify
from roundhouse.weight_sync.replica_state import later_than
from roundhouse.weight_sync.tensor_files import TensorFile, weight_files

TABLE = pa.table({"id": list(range(100))})


def run_in(store: Path | str) -> Run:
    return open_run(parse_config({"run_id": "r", "store": str(store)}))


# A full disk ---------------------------------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
mkdir -p {store} && mount -t tmpfs -o size=600k none {store} && exec {python} - {store} <<'END'
import os, sys
import pyarrow as pa
from roundhouse.config.loading import parse_config
from roundhouse.errors import StoreError
from roundhouse.store.verification import find_garbage
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_table
from roundhouse.store.verification import verify

store, table = sys.argv[1], pa.table({{"id": list(range(100))}})
run = open_run(parse_config({{"run_id": "r", "store": store}}))
first = run.begin(run.stage(1, "collect"), policy_version=0)
first.write_table("rollouts", table)
done = first.commit()
filler = open(store + "/filler", "wb")
filler.write(b"x" * 300_000)
filler.close()

attempt = run.begin(run.stage(2, "collect"), policy_version=0)
kept = attempt.write_table("rollouts", table)
try:
    attempt.write_bytes("large.bin", b"y" * 400_000)
except StoreError as error:
    assert "large.bin" in str(error) and "The disk is full: free space" in str(error), error
else:
    raise AssertionError("600 KiB held more")
assert read_table(done, "rollouts").equals(table)
assert run.stage(2, "collect").reference() is None
assert verify(store).problems == []
assert [item.name for item in find_garbage(store)] == []

os.unlink(store + "/filler")
again = open_run(parse_config({{"run_id": "r", "store": store}}))
second = again.begin(again.stage(2, "collect"), policy_version=0)
second.adopt(kept)
second.write_bytes("large.bin", b"y" * 400_000)
assert read_table(second.commit(), "rollouts").equals(table)
assert verify(store).problems == []
print("whole")
END
"""


def test_on_a_full_disk_nothing_breaks_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk needs user namespaces, which this machine refuses")
    script = ON_A_SMALL_DISK.format(store=tmp_path / "disk", python=sys.executable)
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "whole\n", ended.stderr


def test_a_limit_on_file_sizes_is_told_as_a_full_disk(tmp_path: Path) -> None:
    code = (
        "import resource, signal; from roundhouse.store.location import Location\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"Location({str(tmp_path)!r}).write('a', b'x' * 2000)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert "cannot write" in ended.stderr
    assert "The disk is full" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_by_the_file_that_did_not_fit(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from roundhouse.store.location import Location; from roundhouse.store import disk\n"
        "from roundhouse.health.policy import typed\n"
        f"Location({str(tmp_path / 'store')!r}).write('model', b'x' * 2000)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "def download():\n"
        f"    Location({str(tmp_path / 'store')!r}).download(['model'], Path({str(tmp_path / 'cache')!r}))\n"
        "def write():\n"
        f"    with disk.writing(Path({str(tmp_path / 'weights')!r})) as stream:\n"
        "        stream.write(b'x' * 20000)\n"
        "for act in (download, write):\n"
        "    try:\n"
        "        act()\n"
        "    except Exception as error:\n"
        "        print(type(typed(error)).__name__, typed(error))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    download, write = ended.stdout.splitlines()
    assert download.startswith("DiskFull cannot download")
    assert f"{tmp_path}/cache/model" in download
    assert write.startswith("DiskFull")
    assert f"{tmp_path}/weights" in write


def test_a_read_only_store_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    monkeypatch.setattr("pathlib.Path.open", refuse)
    for act in (lambda: Location(str(tmp_path)).write("a/b", b""), lambda: Location(str(tmp_path)).create("a", b"")):
        with pytest.raises(StoreError, match=r"cannot \w+ .*/a.*its file system is read-only"):
            act()


# Order on the disk ---------------------------------------------------------------------------------------------------


def test_before_a_name_is_on_the_disk_its_bytes_and_its_directories_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "replace")}

    def synced(descriptor: int) -> None:
        order.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.split('.json.')[0].lstrip('.')}")
        real["fsync"](descriptor)

    monkeypatch.setattr("os.fsync", synced)

    def linked(old: Path, new: Path) -> None:
        order.append(f"link {new.name}")
        real["link"](old, new)

    def replaced(old: Path, new: Path) -> None:
        order.append("replace")
        real["replace"](old, new)

    monkeypatch.setattr("os.link", linked)
    monkeypatch.setattr("os.replace", replaced)
    Location(str(tmp_path / "top")).create("a/manifest.json", b"{}")
    assert order == [f"sync {tmp_path.name}", "sync top", "sync manifest", "link manifest.json", "sync a"]
    order.clear()
    Location(str(tmp_path / "top")).write("a/latest.json", b"{}")
    assert order == ["sync latest", "replace", "sync a"]


# Names and links -----------------------------------------------------------------------------------------------------

HOSTILE = ["../up", "a/../../b", "/etc/passwd", "a\0b", "a\n", "a\x1b[31m", "..", "a/..", "~root", "a\\..\\b", "ａ", "é",
           "a\u202eb", "a" * 300, "a/" * 500 + "b", " a", "con:", "%2e%2e/x", "a//b", "-rf"]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_is_refused_everywhere(tmp_path: Path, name: str) -> None:
    place = Location(str(tmp_path / "store"))
    works = (place.read, place.exists, place.delete, lambda n: place.write(n, b""), lambda n: place.create(n, b""))
    for work in (*works, lambda n: place / n, lambda n: place.download([n], tmp_path / "there")):
        with pytest.raises(StoreError, match="a name for the store"):
            work(name)
    with pytest.raises(ConfigError, match="run_id"):
        parse_config({"run_id": name, "store": str(tmp_path)})
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a\0b", "a/../b", "a\nb", "", "..\\up"], ids=ascii)
def test_a_hostile_manifest_is_refused_before_any_file_is_touched(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValidationError, match="leads out"):
        FileEntry(path=name, size=1, sha256="0" * 64)
    run = run_in(tmp_path / "store")
    attempt = run.begin(run.checkpoint(0), policy_version=0)
    attempt.write_bytes("model.safetensors", b"w")
    reference = attempt.commit()
    place = run.checkpoint(0).location
    text = place.read(MANIFEST).replace(b'"model.safetensors"', json.dumps(name).encode())
    place.write(MANIFEST, text)
    hostile = reference.model_copy(update={"digest": sha256(text)})
    with pytest.raises(StoreError, match=r"(?s)is not a manifest.*leads out"):
        local_directory(hostile, tmp_path / "cache")
    assert verify(str(tmp_path / "store")).problems


def test_a_link_does_not_lead_out_of_the_store(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"sesame")
    place = Location(str(tmp_path / "store"))
    place.write("whole", b"x")
    (tmp_path / "store" / "link").symlink_to(secret)
    (tmp_path / "store" / "folder").symlink_to(tmp_path)
    works = [
        lambda: place.read("link"),
        lambda: place.read("folder/secret"),
        lambda: place.write("folder/new", b"x"),
        lambda: place.create("folder/new", b"x"),
        lambda: place.delete("folder/secret"),
        lambda: place.exists("folder/secret"),
    ]
    for work in works:
        with pytest.raises(StoreError, match="link that leads out"):
            work()
    assert place.tree() == ["link", "whole"], "and a walk does not follow it"
    assert secret.read_bytes() == b"sesame"
    assert not (tmp_path / "new").exists()
    place.delete_tree()
    assert secret.exists()


def test_a_store_may_itself_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "large-disk")
    run_in(tmp_path / "store")
    assert (tmp_path / "large-disk" / "runs" / "r" / "run.json").exists()
    assert find_garbage(str(tmp_path / "store")) == []


def test_a_pointer_cannot_lead_the_engine_to_weights_elsewhere(tmp_path: Path) -> None:
    run = run_in(tmp_path / "store")
    attempt = run.begin(run.checkpoint(0), policy_version=0)
    attempt.write_bytes("model.safetensors", b"ours")
    own = attempt.commit()
    shutil.copytree(run.checkpoint(0).location.local_path, tmp_path / "theirs")
    run.point_to(own.model_copy(update={"uri": (tmp_path / "theirs").as_uri()}))
    assert run.latest_checkpoint() == own


@pytest.mark.parametrize("pointer", [None, b"", b"{", b'{"policy_version": 1}'], ids=ascii)
def test_a_run_whose_pointer_is_lost_finds_its_newest_checkpoint_also_after_retention(
    tmp_path: Path, pointer: bytes | None
) -> None:
    run = run_in(tmp_path)
    for version in range(5):
        run.point_to(run.begin(run.checkpoint(version), policy_version=version).commit())
    for version in (1, 2):
        run.checkpoint(version).location.delete_tree()
    run.location.delete("latest.json") if pointer is None else run.location.write("latest.json", pointer)
    newest = run.latest_checkpoint()
    assert newest is not None
    assert newest.policy_version == 4


# A clock that jumps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-30, 30])
def test_nothing_is_decided_by_the_clock_on_the_wall(
    store_uri: str, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(store_uri)
    first = run.begin(run.stage(1, "collect"), policy_version=0)
    first.write_table("rollouts", TABLE)
    run.point_to(run.begin(run.checkpoint(0), policy_version=0).commit())
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + hours * 3600)
    again = run_in(store_uri)
    assert again.uid == run.uid
    second = again.begin(again.stage(1, "collect"), policy_version=0)
    assert second.number == 2
    second.write_table("rollouts", TABLE)
    reference = second.commit()
    assert first.commit() == reference, "the first to commit wins, whatever its clock says"
    run.point_to(again.begin(again.checkpoint(1), policy_version=1).commit())
    newest = run.latest_checkpoint()
    assert newest is not None
    assert newest.policy_version == 1
    assert read_table(reference, "rollouts").equals(TABLE)
    assert read_manifest(reference).attempt == 2
    assert verify(store_uri).problems == []
    assert [item.name.rsplit("/", 1)[1] for item in find_garbage(store_uri)] == ["rollouts-a0001-00000.parquet"]


def test_a_newer_wish_stays_newer_though_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"policy_version": 3, "request": later_than([None])}
    monkeypatch.setattr("time.time_ns", lambda: 1)
    assert later_than([before, None, {"policy_version": 2}]) == before["request"] + 1


def test_everything_that_reads_a_manifest_checks_it(tmp_path: Path) -> None:
    for text in (b"", b"{", b"[]", b'{"kind": "x"}', b"\xff\xfe", b"[" * 100_000):
        run = run_in(tmp_path / sha256(text)[:8])
        stage = run.stage(1, "collect")
        stage.location.write(MANIFEST, text)
        with pytest.raises(StoreError, match="not a manifest"):
            stage.reference()
        with pytest.raises(StoreError, match="not a manifest"):
            read_manifest(Reference(kind="x", uri=stage.location.uri, digest="", iteration=1, policy_version=0))
        assert len(verify(str(tmp_path / sha256(text)[:8])).problems) == 1
    assert Manifest.model_fields["files"].annotation == list[FileEntry]


def test_a_tree_that_changes_while_it_is_listed_is_no_error(tmp_path: Path) -> None:
    assert disk.tree(str(tmp_path / "nothing")) == []
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_bytes(b"")
    assert disk.tree(str(tmp_path)) == ["a/b/c"]


def test_a_fifo_in_a_store_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    place = Location(str(tmp_path))
    os.mkfifo(tmp_path / "run.json")
    for read in (
        lambda: place.read("run.json"),
        lambda: place.read_range("run.json", 0, 4),
        lambda: place.digest("run.json"),
        lambda: place.download(["run.json"], tmp_path / "copy"),
        lambda: read_identity(place),
    ):
        with pytest.raises(StoreError, match=r"run\.json"):
            read()
    with pytest.raises(OSError, match="not a regular file"):
        file_digest(tmp_path / "run.json")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="not a safetensors file"):
        TensorFile(tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="has no safetensors files"):
        weight_files(tmp_path)


def test_a_read_only_file_system_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk, "replace", refuse)
    with pytest.raises(
        StoreError, match=r"a\.json: its file system is read-only\. Mount it writable, or name another store"
    ):
        Location(str(tmp_path)).write("a.json", b"")
