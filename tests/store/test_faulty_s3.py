"""The store on an S3 endpoint that fails, throttles, breaks connections, loses replies and cuts bodies short."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import httpx
import pytest
import s3fs

from roundhouse.config.loading import parse_config
from roundhouse.store.location import AlreadyExists, Location
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_file, read_manifest
from roundhouse.store.verification import verify
from tests.ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.real


@pytest.fixture
def faulty_store(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """A store behind the proxy, and the URL that returns its faults."""
    bucket = f"rh-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=bucket)
    port = free_port()
    options = ["--upstream", s3_server, "--port", str(port), "--rate", "0.2", "--seed", "3", "--slow-seconds", "0.2"]
    process = subprocess.Popen([sys.executable, "-m", "tests.chaos.faulty_s3", *options], env=dict(os.environ))
    told = f"http://127.0.0.1:{port}/rh/faults"
    try:
        until(lambda: _answers(told), "the faulty endpoint", process=process)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        s3fs.S3FileSystem.clear_instance_cache()
        yield f"s3://{bucket}/store", told
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=1)
    except httpx.HTTPError:
        return False
    return True


def test_what_was_committed_is_whole_and_every_writer_learns_what_it_did(faulty_store: tuple[str, str]) -> None:
    store, told = faulty_store
    run = open_run(parse_config({"run_id": "r", "store": store}))
    for iteration in range(1, 9):
        attempt = run.begin(run.stage(iteration, "collect"), policy_version=0)
        data = os.urandom(20_000)
        entry = attempt.write_bytes("part.bin", data)
        reference = attempt.commit(counts={"attempt": attempt.number})
        assert read_manifest(reference).counts == {"attempt": attempt.number}
        assert read_file(reference, entry) == data
    assert verify(store).problems == []
    made = httpx.get(told).json()
    assert sum(made.values()) >= 10
    assert {"lost reply", "truncated"} <= made.keys()


def test_one_who_created_an_object_is_told_so_though_the_reply_was_lost(faulty_store: tuple[str, str]) -> None:
    location = Location(faulty_store[0])
    for number in range(25):
        location.create(f"object-{number}", f"mine {number}".encode())
    with pytest.raises(AlreadyExists):
        location.create("object-0", b"another's")
    assert location.read("object-0") == b"mine 0"
