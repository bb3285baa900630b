"""Faults of a bucket, planted singly: temporary ones are waited out within a limit, others are reported with a remedy."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import s3fs

from roundhouse.config.loading import parse_config
from roundhouse.errors import DataError, InfraError, StoreError
from roundhouse.infra.checks import reachability
from roundhouse.store.bucket import PAUSES, StoreUnavailable, open_bucket
from roundhouse.store.bucket_client import BucketClient
from roundhouse.store.directories import copy_object
from roundhouse.store.lease import take
from roundhouse.store.location import AlreadyExists, Location, NoBucket, NotFound
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import MANIFEST, read_table
from roundhouse.store.verification import find_garbage, verify
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.checkpoint_files import fetch_checkpoint
from tests import fork_server
from tests.store.endpoint import Endpoint, endpoint

pytestmark = pytest.mark.real

TABLE = pa.table({"id": list(range(50))})


@pytest.fixture
def planted(s3_server: str) -> Iterator[Endpoint]:
    with endpoint(s3_server) as proxy:
        yield proxy


@pytest.fixture
def store(planted: Endpoint) -> str:
    bucket = f"rh-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=bucket)
    return f"s3://{bucket}/store"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.5")


def run_in(store: str) -> Run:
    return open_run(parse_config({"run_id": "r", "store": store}))


@pytest.mark.parametrize("fault", ["error", "throttle", "refused", "lost reply", "truncated"])
def test_a_failure_that_passes_is_waited_out(planted: Endpoint, store: str, fault: str) -> None:
    place = Location(store)
    planted.plant(fault, "(GET|PUT|HEAD) .*object", times=4)
    place.write("object", b"x" * 1000)
    place.create("object-2", b"y")
    assert place.read("object") == b"x" * 1000
    with pytest.raises(AlreadyExists):
        place.create("object-2", b"z")
    assert planted.made[fault] == 4


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        ("error", lambda place: place.read("object")),
        ("throttle", lambda place: place.write("object", b"x")),
        ("throttle", lambda place: place.names()),
        ("refused", lambda place: place.create("object", b"x")),
        ("refused", lambda place: place.exists("object")),
        ("error", lambda place: place.delete("object")),
    ],
)
def test_one_that_does_not_pass_ends_in_time_and_says_which_object_and_what_to_do(
    planted: Endpoint, store: str, impatient: None, fault: str, operation: Callable[[Location], object]
) -> None:
    place = Location(store)
    place.write("object", b"x")
    planted.plant(fault, ".*")
    begun = time.monotonic()
    with pytest.raises(
        StoreUnavailable, match=r"cannot .*s3://.*/store.*no answer after \d+ attempts.*AWS_ENDPOINT_URL"
    ):
        operation(place)
    assert time.monotonic() - begun < 15
    assert issubclass(StoreUnavailable, InfraError)  # so that the stage's task is repeated


@pytest.mark.parametrize("fault", ["error", "throttle", "refused"])
def test_a_copy_by_the_server_is_waited_for_as_every_request_is(
    planted: Endpoint, store: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, copy = Location(store), Location(store) / "copy"
    place.write("object", b"x")
    planted.plant(fault, "PUT .*copy/object", times=4)
    copy_object(place, copy, "object")
    assert copy.read("object") == b"x"
    monkeypatch.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.5")
    planted.plant(fault, "PUT .*copy/object")
    with pytest.raises(StoreUnavailable, match=r"cannot copy s3://.*/object to s3://.*/copy/object: no answer after"):
        copy_object(place, copy, "object")


# Conditional writes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["unconditional", "501", "400"])
def test_a_service_without_conditional_writes_is_refused_before_a_run_is_written(
    planted: Endpoint, store: str, fault: str
) -> None:
    planted.plant(fault, "PUT .*")
    for act in (
        lambda: run_in(store),
        lambda: take(Location(f"{store}/runs/r")),
        lambda: Location(store).create("a", b""),
    ):
        with pytest.raises(StoreError, match=r"(ignores|refuses).*Use storage with conditional writes \(If-None-Match"):
            act()
    assert Location(store).tree() == []
    (finding,) = reachability.store(store)
    assert "conditional writes" in finding.detail


def test_conditional_writes_are_tested_once_in_a_process(planted: Endpoint, store: str) -> None:
    place = Location(store)
    for name in ("a", "b"):
        place.create(name, b"x")
    assert [line.split(" ")[0] for line in planted.seen if "probe" in line] == ["PUT", "PUT", "DELETE"]
    assert place.tree() == ["a", "b"]


def test_every_412_to_a_conditional_write_means_that_the_object_exists(planted: Endpoint, store: str) -> None:
    planted.plant("bare 412", "PUT .*")
    place = Location(store)
    place.create("object", b"x")
    with pytest.raises(AlreadyExists):
        place.create("object", b"y")
    place.create("object", b"x")  # the reply to this request may have been lost
    assert place.read("object") == b"x"


# Expired credentials, damaged bodies, other programs ------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Location], object]] = {
    "read": lambda place: place.read("object"),
    "read range": lambda place: place.read_range("object", 0, 3),
    "write": lambda place: place.write("other", b"y"),
    "write streamed": lambda place: place.write_streamed("other", [b"y"]),
    "create": lambda place: place.create("new", b"y"),  # the second time, it finds the object that it made itself
    "exists": lambda place: place.exists("object"),
    "stamp": lambda place: place.stamp("object"),
    "copy": lambda place: (place / "copy").copy_from(place, "object"),
    "names": lambda place: place.names(),
    "tree": lambda place: place.tree(),
    "delete": lambda place: place.delete("object"),
}
ANSWERS = {"read": b"x" * 9, "read range": b"xxx", "exists": True, "names": ["copy", "new", "object", "other"]}


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ("expired", "credentials have expired: renew them"),
        ("portal", "another program answers at this endpoint"),
    ],
)
def test_expired_credentials_and_foreign_replies_are_waited_out_and_then_named(
    planted: Endpoint, store: str, fault: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Location(store)
    place.write("object", b"x" * 9)
    for name, operation in OPERATIONS.items():
        count = planted.made[fault]
        planted.plant(fault, ".*", times=1)
        result = operation(place)
        assert planted.made[fault] == count + 1, name
        assert name not in ANSWERS or result == ANSWERS[name]
        with monkeypatch.context() as impatience:
            impatience.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.01")
            planted.plant(fault, ".*")
            with pytest.raises(StoreUnavailable, match=remedy) as refusal:
                operation(place)
        planted.heal()
        assert isinstance(refusal.value, InfraError), name  # exit code 75: the same command may succeed later


def test_renewed_credentials_are_used_by_the_next_attempt(
    planted: Endpoint, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\n"
    file.write_text(text.format("OLD"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    BucketClient.clear_instance_cache()
    place = Location(store)
    planted.refused_key = "OLD"
    threading.Timer(0.3, lambda: file.write_text(text.format("NEW"))).start()
    place.write("object", b"x")
    assert planted.made["expired"] >= 1
    BucketClient.clear_instance_cache()


def test_a_body_of_full_length_with_other_bytes_is_read_again(planted: Endpoint, store: str) -> None:
    place = Location(store)
    place.write("object", b"x" * 1000)
    planted.plant("damaged", "GET .*object", times=2)
    assert place.read("object") == b"x" * 1000
    assert b"".join(place.read_streamed("object")) == b"x" * 1000
    assert planted.made["damaged"] == 2


@pytest.mark.parametrize("fault", ["whole", "shifted", "short"])
def test_a_range_has_the_bytes_that_were_requested(
    planted: Endpoint, store: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, data = Location(store), bytes(range(200))
    place.write("object", data)
    planted.plant(fault, "GET .*object", times=2)
    assert place.read_range("object", 10, 20) == data[10:20]
    assert planted.made[fault] == 2
    monkeypatch.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.01")
    planted.plant(fault, "GET .*object")
    with pytest.raises(StoreUnavailable, match="in reply to bytes=10-19: a proxy ignores or changes ranges"):
        place.read_range("object", 10, 20)


def test_a_whole_object_has_the_size_that_the_service_reports(planted: Endpoint, store: str) -> None:
    place, data = Location(store), bytes(range(200))
    place.write("object", data)
    planted.plant("short", "GET .*object", times=2)
    assert place.read("object") == data
    assert planted.made["short"] == 2


def test_an_object_is_missing_only_if_the_service_reports_it(
    planted: Endpoint, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy answers 404 for all while the service behind it restarts; a stage that is complete must not seem missing."""
    place = Location(store)
    place.write("object", b"x" * 9)
    for name, operation in OPERATIONS.items():
        planted.plant("foreign 404", ".*", times=1)
        result = operation(place)
        assert name not in ANSWERS or result == ANSWERS[name], name
        with monkeypatch.context() as impatience:
            impatience.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.01")
            planted.plant("foreign 404", ".*")
            with pytest.raises(StoreUnavailable, match=r"HTTP 404.*not an error of S3: another program answers"):
                operation(place)
        planted.heal()


def test_a_bare_404_of_a_head_is_a_missing_object(planted: Endpoint, store: str) -> None:
    """Not every service of S3's protocol numbers its replies in a header."""
    planted.plant("bare", "HEAD .*absent")
    assert not Location(store).exists("absent")
    assert planted.made["bare"] == 1


def test_a_redirection_to_nowhere_is_named(planted: Endpoint, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Location(store)
    place.create("object", b"x")
    monkeypatch.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.01")
    planted.plant("redirect", ".*")
    for operation in (lambda: place.read("object"), lambda: place.write("other", b"y"), lambda: place.names()):
        with pytest.raises(StoreUnavailable, match=r"301 redirects to nothing.*AWS_ENDPOINT_URL.*AWS_DEFAULT_REGION"):
            operation()


def test_another_region_is_named_if_the_client_cannot_follow(planted: Endpoint, store: str) -> None:
    place = Location(store)
    place.create("object", b"x")
    planted.plant("moved", ".*")
    for operation in (lambda: place.read("object"), lambda: place.write("other", b"y"), lambda: place.names()):
        with pytest.raises(StoreError, match=r"the bucket is in another region\. Set AWS_DEFAULT_REGION"):
            operation()


@pytest.mark.parametrize(
    "operation",
    [lambda place: place.read("object"), lambda place: place.write("object", b"y"), lambda place: place.names()],
)
def test_a_clock_that_differs_is_named(planted: Endpoint, store: str, operation: Callable[[Location], object]) -> None:
    """The reply to a HEAD has no body to name it; its date shows it."""
    place = Location(store)
    place.write("object", b"x")
    planted.plant("skewed", ".*")
    with pytest.raises(StoreError, match="clock differs from the bucket's by more than it accepts: set the clock"):
        operation(place)


def test_a_list_without_an_end_is_an_error(planted: Endpoint, store: str, impatient: None) -> None:
    place = Location(store)
    place.write("a/object", b"x")
    planted.repeats_pages = True
    for listed in (place.names, place.tree):
        with pytest.raises(StoreUnavailable, match="the page after 'p' is itself"):
            listed()


@pytest.mark.parametrize(
    ("pattern", "text", "reason"),
    [
        ("<Key>store/", "<Key>another/", "'another/object' in the list of 'store/'"),
        (r"<Prefix>[^<]*</Prefix>", "<Prefix>another/</Prefix>", "'another/' in the list of 'store/'"),
        (r"<IsTruncated>\w+<", "<IsTruncated>true<", "the next one is not named"),
    ],
)
def test_a_list_of_something_else_is_an_error(
    planted: Endpoint, store: str, impatient: None, pattern: str, text: str, reason: str
) -> None:
    """Its names would be read as objects of this directory, and could be deleted as its garbage."""
    place = Location(store)
    place.write("object", b"x")
    planted.rewritten = pattern, text
    for listed in (place.names, place.tree):
        with pytest.raises(StoreUnavailable, match=reason):
            listed()


def test_an_object_that_is_listed_twice_is_one(planted: Endpoint, store: str) -> None:
    place = Location(store)
    place.write("object", b"x")
    planted.rewritten = r"(?s)(<Contents>.*</Contents>)", r"\1\1"
    assert place.names() == place.tree() == ["object"]


def test_an_endpoint_that_hangs_is_given_up(planted: Endpoint, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "0.5")
    monkeypatch.setenv("ROUNDHOUSE_STORE_ATTEMPT_SECONDS", "0.5")
    planted._slow_seconds = 600
    planted.plant("slow", ".*")
    with pytest.raises(StoreUnavailable, match="FSTimeoutError"):  # long before the endpoint answers
        Location(store).read("object")


def test_a_limit_that_is_no_number_is_named(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_STORE_RETRY_SECONDS", "soon")
    with pytest.raises(Exception, match="ROUNDHOUSE_STORE_RETRY_SECONDS is 'soon'"):
        Location(store).read("object")


def test_attempts_come_ever_more_rarely_and_not_in_step() -> None:
    drawn = [[PAUSES.pause(attempt) for attempt in range(1, 13)] for _ in range(20)]
    assert all(0.5 * PAUSES.first <= each[0] <= 1.5 * PAUSES.first for each in drawn)
    assert all(0.5 * PAUSES.longest <= each[-1] <= 1.5 * PAUSES.longest for each in drawn)
    assert len({round(each[3], 6) for each in drawn}) == 20


def test_missing_credentials_are_said(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    BucketClient.clear_instance_cache()
    with pytest.raises(StoreError, match=r"permission denied.*AWS_ACCESS_KEY_ID"):
        Location(store).read("object")


def test_a_part_of_a_dataset_that_is_cut_on_the_way_is_read_again(planted: Endpoint, store: str) -> None:
    attempt = run_in(store).begin(run_in(store).stage(1, "collect"), policy_version=0)
    attempt.write_table("rollouts", TABLE)
    reference = attempt.commit()
    planted.plant("truncated", "GET .*rollouts-a0001", times=3)
    assert read_table(reference, "rollouts").equals(TABLE)
    assert planted.made["truncated"] == 3


@pytest.mark.smoke("S3")
def test_a_write_in_parts_survives_cuts_and_leaves_no_half_object(
    planted: Endpoint, store: str, impatient: None
) -> None:
    place, data = Location(store), random.Random(0).randbytes(33 * 2**20)
    planted.plant("refused", "PUT .*model.*partNumber=2", times=2)
    place.write("model.safetensors", data)
    assert any("partNumber=3" in line for line in planted.seen)
    assert place.read("model.safetensors") == data
    planted.plant("refused", "PUT .*model.*partNumber=2")
    with pytest.raises(StoreUnavailable, match=r"cannot write .*model\.safetensors"):
        place.write("model.safetensors", data[::-1])
    planted.heal()
    assert place.read("model.safetensors") == data


def test_a_commit_whose_fate_is_unknown_is_found_by_the_next_start(
    planted: Endpoint, store: str, impatient: None
) -> None:
    run = run_in(store)
    attempt = run.begin(run.stage(1, "collect"), policy_version=0)
    attempt.write_table("rollouts", TABLE)
    planted.plant("lost reply", "PUT .*manifest")
    planted.plant("refused", "(GET|HEAD) .*manifest")
    with pytest.raises(StoreUnavailable):
        attempt.commit()
    planted.heal()
    found = run_in(store).stage(1, "collect").reference()
    assert found is not None
    assert read_table(found, "rollouts").equals(TABLE)


# A listing that is late ----------------------------------------------------------------------------------------------


def test_attempts_are_numbered_apart_though_the_listing_lacks_the_newest(planted: Endpoint, store: str) -> None:
    run = run_in(store)
    planted.hide = re.compile("attempt-")
    attempts = [run.begin(run.stage(1, "collect"), policy_version=0) for _ in range(3)]
    assert [attempt.number for attempt in attempts] == [1, 2, 3]


def test_a_complete_stage_is_complete_though_it_is_not_listed_and_a_deleted_one_is_not_though_it_is(
    planted: Endpoint, store: str
) -> None:
    run = run_in(store)
    reference = run.begin(run.stage(1, "collect"), policy_version=0).commit()
    planted.hide = re.compile("manifest")
    assert run.stage(1, "collect").reference() == reference
    planted.heal()
    planted.ghosts = {f"store/runs/r/iterations/000002/collect/{MANIFEST}"}
    assert run.stage(2, "collect").reference() is None
    assert verify(store).problems == []
    assert find_garbage(store) == []


def make_checkpoints(run: Run, versions: int) -> None:
    for version in range(versions):
        attempt = run.begin(run.checkpoint(version), policy_version=version)
        attempt.write_bytes("model.safetensors", b"weights %d" % version)
        run.point_to(attempt.commit())


def test_the_newest_checkpoint_is_found_though_it_is_not_listed(planted: Endpoint, store: str) -> None:
    run = run_in(store)
    make_checkpoints(run, 5)
    planted.hide = re.compile("checkpoints/00000[34]")
    newest = run.latest_checkpoint()
    assert newest is not None
    assert newest.policy_version == 4
    run.location.delete("latest.json")
    newest = run.latest_checkpoint()
    assert newest is not None
    assert newest.policy_version == 4
    planted.ghosts = {"store/runs/r/checkpoints/000009/model.safetensors"}
    assert run.checkpoint_versions() == [0, 1, 2]


def test_garbage_collection_spares_a_checkpoint_whose_manifest_is_not_listed(planted: Endpoint, store: str) -> None:
    run = run_in(store)
    make_checkpoints(run, 3)
    planted.hide = re.compile(f"checkpoints/000001/{MANIFEST}")
    assert find_garbage(store) == []
    run.checkpoint(1).location.delete(MANIFEST)
    assert [item.name for item in find_garbage(store)] == [
        "runs/r/checkpoints/000001/attempt-0001.json",
        "runs/r/checkpoints/000001/model.safetensors",
    ]


def test_weights_are_fetched_by_their_manifest_and_not_by_the_listing(
    planted: Endpoint, store: str, tmp_path: Path
) -> None:
    run = run_in(store)
    attempt = run.begin(run.checkpoint(0), policy_version=0)
    for name in ("model-00001.safetensors", "model-00002.safetensors", "config.json"):
        attempt.write_bytes(name, name.encode())
    reference = attempt.commit()
    planted.hide = re.compile("model-00002")
    fetched, _ = fetch_checkpoint(reference.uri, NodeCache(tmp_path, 10**9))
    assert {"model-00001.safetensors", "model-00002.safetensors", "config.json"} <= {p.name for p in fetched.iterdir()}
    run.checkpoint(0).location.write("model-00002.safetensors", b"another's")
    with pytest.raises(DataError, match=r"model-00002\.safetensors differs from its manifest"):
        fetch_checkpoint(reference.uri, NodeCache(tmp_path / "elsewhere", 10**9))


# Two writers ---------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from roundhouse.config.loading import parse_config
from roundhouse.store.run import open_run
store, mark = sys.argv[1:]
run = open_run(parse_config({"run_id": "r", "store": store}))
attempt = run.begin(run.stage(1, "collect"), policy_version=0)
for part in range(3):
    attempt.write_bytes(f"part-{part}-a{attempt.number:04d}.bin", f"{mark} {part}".encode())
print("ready", flush=True)
sys.stdin.readline()
reference = attempt.commit(details={"mark": mark})
print(reference.digest, run.uid, flush=True)
"""


def test_of_two_processes_that_write_one_stage_one_wins_and_nothing_is_mixed(store_uri: str) -> None:
    command = [sys.executable, "-c", WRITER, store_uri]
    writers = [
        fork_server.start(
            [*command, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        for mark in ("first", "second")
    ]
    try:
        assert [writer.stdout.readline() for writer in writers if writer.stdout] == ["ready\n"] * 2
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        told = {writer.communicate(timeout=60)[0].strip() for writer in writers}
    finally:
        for writer in writers:
            writer.kill()
    assert len(told) == 1
    run = run_in(store_uri)
    reference = run.stage(1, "collect").reference()
    assert reference is not None
    assert told == {f"{reference.digest} {run.uid}"}
    place = run.stage(1, "collect").location
    names = [name for name in place.names() if name.startswith("part-")]
    assert len(names) == 6
    winner = json.loads(place.read(MANIFEST))
    held = [place.read(entry["path"]).decode() for entry in winner["files"]]
    assert held == [f"{winner['details']['mark']} {part}" for part in range(3)]


def test_a_bucket_that_is_not_there_is_called_a_missing_bucket(s3_server: str) -> None:
    place = Location("s3://rh-nowhere/store/runs/base")
    for act in (lambda: place.create("run.json", b"{}"), lambda: place.read("run.json")):
        with pytest.raises(
            NoBucket, match=rf"bucket 'rh-nowhere' does not exist at {s3_server}\. Create it, or correct `store`"
        ):
            act()


def test_a_read_of_what_is_not_there_is_not_repeated(planted: Endpoint, store: str) -> None:
    place = Location(store)
    with pytest.raises(NotFound):
        place.read("nothing")
    assert len([line for line in planted.seen if "nothing" in line]) <= 2


def test_a_bucket_on_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert open_bucket().config_kwargs["proxies"] == {}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example")
    assert "proxies" not in open_bucket().config_kwargs
