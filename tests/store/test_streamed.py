"""Objects larger than the memory of a process: written and read in bounded parts."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
import uuid
from collections.abc import Iterator
from ctypes import c_int64
from pathlib import Path

import pytest
import s3fs

from roundhouse.errors import StoreError
from roundhouse.store import bucket, disk
from roundhouse.store.location import Location, NotFound
from tests.store.endpoint import Endpoint, endpoint

pytestmark = pytest.mark.real

MIB = 2**20
DATA = os.urandom(MIB) * 21 + b"the end"
"""Four parts of 5 MiB, the least that S3 takes, and a rest."""


def chunks(data: bytes = DATA, size: int = MIB) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "CHUNK_BYTES", 5 * MIB)


@pytest.mark.parametrize(
    "data", [b"", b"small", DATA[: 10 * MIB], DATA], ids=["empty", "small", "whole parts", "parts"]
)
def test_what_was_written_in_parts_is_read_in_parts(store_uri: str, small_parts: None, data: bytes) -> None:
    place = Location(store_uri)
    written = place.write_streamed("folder/object", chunks(data))
    assert (written.size, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (written.size, written.stamp) == place.stamp("folder/object")
    assert b"".join(place.read_streamed("folder/object")) == data == place.read("folder/object")
    assert place.digest("folder/object") == (written.size, written.sha256)
    place.write("folder/object", data[:-1] + b"!")
    assert place.stamp("folder/object")[1] != written.stamp
    with pytest.raises(NotFound):
        place.digest("folder/none")


def test_a_write_that_breaks_off_leaves_what_was_there(store_uri: str, small_parts: None) -> None:
    place = Location(store_uri)
    place.write("object", b"before")

    def breaking() -> Iterator[bytes]:
        yield DATA[: 12 * MIB]
        raise ValueError("the writer failed")

    with pytest.raises(ValueError, match="the writer failed"):
        place.write_streamed("object", breaking())
    assert place.read("object") == b"before"
    assert place.tree() == ["object"]


def test_a_file_whose_digest_is_known_is_not_hashed_again(store_uri: str, tmp_path: Path, small_parts: None) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    place = Location(store_uri)
    assert place.write_file("taken", source).sha256 == hashlib.sha256(DATA).hexdigest()
    assert place.write_file("known", source, "of its writer").sha256 == "of its writer"
    assert place.read("known") == DATA


def test_a_file_that_is_given_up_becomes_the_object_without_a_copy(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    inode = source.stat().st_ino
    place = Location(str(tmp_path / "store"))
    written = place.write_file("object", source, move=True)
    assert not source.exists()
    assert (tmp_path / "store/object").stat().st_ino == inode
    assert (written.size, written.sha256) == place.digest("object")


def test_memory_does_not_grow_with_the_object(tmp_path: Path) -> None:
    place = Location(str(tmp_path))
    block = os.urandom(MIB)
    tracemalloc.start()
    try:
        place.write_streamed("object", (block for _ in range(64)))
        place.digest("object")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 * MIB


@pytest.fixture
def planted(s3_server: str) -> Iterator[tuple[Endpoint, str]]:
    with endpoint(s3_server) as proxy:
        bucket_name = f"rh-{uuid.uuid4().hex[:12]}"
        s3fs.S3FileSystem().call_s3("create_bucket", Bucket=bucket_name)
        yield proxy, f"s3://{bucket_name}/store"


def open_uploads(store: str) -> int:
    name = store.removeprefix("s3://").split("/", 1)[0]
    return len(s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=name).get("Uploads", []))


@pytest.mark.parametrize("fault", ["refused", "lost reply", "error"])
def test_a_part_that_fails_is_sent_again_alone(planted: tuple[Endpoint, str], small_parts: None, fault: str) -> None:
    proxy, store = planted
    proxy.plant(fault, "PUT .*partNumber=2", times=2)
    place = Location(store)
    assert place.write_streamed("object", chunks()).size == len(DATA)
    assert place.read("object") == DATA
    sent = [line for line in proxy.seen if "partNumber=" in line]
    assert sum("partNumber=1" in line for line in sent) == 1
    assert open_uploads(store) == 0


def test_an_upload_whose_last_reply_was_lost_is_whole(planted: tuple[Endpoint, str], small_parts: None) -> None:
    proxy, store = planted
    proxy.plant("lost reply", "POST .*uploadId=", times=3)
    place = Location(store)
    assert place.write_streamed("object", chunks()).sha256 == hashlib.sha256(DATA).hexdigest()
    assert place.read("object") == DATA


def test_an_upload_that_is_given_up_leaves_no_parts_behind(
    planted: tuple[Endpoint, str], small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, store = planted
    monkeypatch.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.5")
    proxy.plant("refused", "PUT .*partNumber=3")
    with pytest.raises(StoreError, match=r"cannot write s3://.*object"):
        Location(store).write_streamed("object", chunks())
    proxy.heal()
    assert not Location(store).exists("object")
    assert open_uploads(store) == 0


@pytest.mark.parametrize("offered", [True, False])
def test_large_parts_of_a_file_are_on_their_way_to_the_disk_before_it_ends(
    offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    class Libc:
        if offered:

            def sync_file_range(self, descriptor: int, begin: c_int64, size: c_int64, flags: int) -> None:
                assert os.fstat(descriptor).st_size >= begin.value + size.value, "they were handed to the kernel"
                begun.append((begin.value, size.value))

    monkeypatch.setattr(disk, "_LIBC", Libc())
    place = Location(str(tmp_path))
    place.write_streamed("object", chunks(DATA, 8 * MIB))
    assert place.read("object") == DATA
    assert begun == ([(0, 8 * MIB), (8 * MIB, 8 * MIB), (16 * MIB, len(DATA) - 16 * MIB)] if offered else [])
