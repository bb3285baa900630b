"""Whole checkpoints in a node's cache: found by content, checked when they come, never needed."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import s3fs

from roundhouse.errors import StoreError
from roundhouse.store.directories import upload_model
from roundhouse.store.location import Location
from roundhouse.store.stage import FileEntry, Provenance, Reference, Stage, model_location
from roundhouse.weight_sync.checkpoint_files import CheckpointCache, content_key

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "trainer/optimizer.safetensors": b"o" * 9000}
SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def bucket(s3_server: str) -> str:
    name = f"rh-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=name)
    return f"s3://{name}"


def written(directory: Path) -> Path:
    for name, data in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def published(uri: str, directory: Path) -> tuple[Reference, list[FileEntry]]:
    stage = Stage(Location(uri), kind="checkpoint", run_id="a", iteration=1)
    attempt = stage.begin(Provenance(config_digest="c", code_version="v", policy_version=1, seed=0))
    written = upload_model(stage.location, attempt.name, directory)
    for file in written.files:
        attempt.adopt(file)
    return attempt.commit(directory=written.directory), written.named()


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_checkpoint_is_fetched_once_for_a_node(bucket: str, tmp_path: Path) -> None:
    reference, _ = published(f"{bucket}/1", written(tmp_path / "made"))
    (tmp_path / "node").mkdir()
    for fetched in (SIZE, 0):
        cache = CheckpointCache(tmp_path / "node", 10**9)
        assert content(cache.checkpoint(reference, tmp_path / "scratch")) == FILES
        assert cache.fetched_bytes == fetched
        cache.release()
    assert not (tmp_path / "scratch").exists()


def test_what_a_step_wrote_is_not_fetched_by_the_next(bucket: str, tmp_path: Path) -> None:
    """The step that writes a checkpoint knows its files, and not yet its manifest."""
    made = written(tmp_path / "made")
    reference, files = published(f"{bucket}/1", made)
    (tmp_path / "node").mkdir()
    CheckpointCache(tmp_path / "node", 10**9).keep(files, made)
    cache = CheckpointCache(tmp_path / "node", 10**9)
    assert content(cache.checkpoint(reference, tmp_path / "scratch")) == FILES
    assert cache.fetched_bytes == 0


def test_of_what_no_step_holds_only_the_bound_is_kept(bucket: str, tmp_path: Path) -> None:
    made = written(tmp_path / "made")
    reference, files = published(f"{bucket}/1", made)
    (tmp_path / "node").mkdir()
    cache = CheckpointCache(tmp_path / "node", SIZE + 100)
    place = cache.checkpoint(reference, tmp_path / "scratch")
    (made / "config.json").write_bytes(b"{ }")
    other, others = published(f"{bucket}/2", made)
    cache.keep(others, made)
    assert place.is_dir(), "it is held"
    cache.release()
    cache.checkpoint(other, tmp_path / "scratch")
    third = CheckpointCache(tmp_path / "node", 0)
    (made / "config.json").write_bytes(b"{  }")
    _, more = published(f"{bucket}/3", made)
    third.keep(more, made)
    assert not place.exists()
    assert content_key(files) != content_key(others)


def test_a_damaged_file_is_no_entry(bucket: str, tmp_path: Path) -> None:
    reference, _ = published(f"{bucket}/1", written(tmp_path / "made"))
    model_location(Location(f"{bucket}/1")).write("model.safetensors", b"x" * 5000)
    (tmp_path / "node").mkdir()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"model\.safetensors is damaged"):
            CheckpointCache(tmp_path / "node", 10**9).checkpoint(reference, tmp_path / "scratch")


def test_a_cache_that_cannot_be_used_is_done_without(
    bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, files = published(f"{bucket}/1", written(tmp_path / "made"))
    cache = CheckpointCache(tmp_path / "nowhere", 10**9)
    assert content(cache.checkpoint(reference, tmp_path / "scratch")) == FILES
    cache.keep(files, tmp_path / "made")
    assert "done without" in caplog.text
    assert cache.fetched_bytes == SIZE
