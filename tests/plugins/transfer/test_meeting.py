"""A group of plain processes: sent weights arrive completely everywhere, and no member waits for a lost one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed import PrefixStore, TCPStore

from roundhouse.plugins.transfer import transport as transfer
from roundhouse.plugins.transfer.gloo import ALIGNMENT, BATCH_BYTES, GlooGroup, batches, places, views
from roundhouse.plugins.transfer.transport import NoSeat, Seat, TransferSource, take_seat
from roundhouse.weight_sync.sending import Described
from roundhouse.weight_sync.tensor_files import digest_of_tensors, tensor_digests, torch_digest, weight_files
from tests import fork_server
from tests.plugins.transfer.ends import described_in, end_of, file_sender
from tests.training.tiny import make_model

pytestmark = pytest.mark.real

SECONDS = 60.0
HERE = "127.0.0.1"


@st.composite
def described(draw: Any) -> list[Described]:
    one = st.tuples(
        st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
    )
    return [Described(f"t{at}", dtype, shape) for at, (dtype, shape) in enumerate(draw(st.lists(one, max_size=12)))]


@settings(max_examples=50)
@given(described(), st.integers(1, 500))
def test_batches_hold_every_tensor_once_in_order_and_places_do_not_overlap(
    tensors: list[Described], bound: int
) -> None:
    found = list(batches(tensors, bound))
    assert [one for batch in found for one in batch] == tensors
    for batch in found:
        assert sum(one.bytes for one in batch[:-1]) < bound
        begins, size = places(batch)
        ends = [begin + one.bytes for begin, one in zip(begins, batch, strict=True)]
        assert all(end <= begin for end, begin in zip(ends, [*begins[1:], size], strict=True))
        assert all(begin % ALIGNMENT == 0 for begin in begins)
        shapes = [(name, tuple(view.shape)) for name, view in views(torch.empty(size, dtype=torch.uint8), batch)]
        assert shapes == [(one.name, one.shape) for one in batch]


def received(seat: Seat) -> str:
    """Digest of all that came."""
    tensors = end_of(seat).receive(described_in(seat), seat.init["packed_buffer_size_bytes"])
    return digest_of_tensors(dict(torch_digest(*one) for batch in tensors for one in batch))


def at_once(*work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [one.result(2 * SECONDS) for one in [pool.submit(one) for one in work]]


def test_those_that_come_together_are_one_group_and_who_comes_later_is_the_next(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    digest = digest_of_tensors(tensor_digests(weight_files(model)))
    with file_sender(model, ["a", "b"], SECONDS, 10_000) as sender:
        way = sender.source()
        seats = at_once(lambda: take_seat(way, "a", 1), lambda: take_seat(way, "b", 2))
        assert {seat.init["world_size"] for seat in seats} == {4}, "one has two workers"
        assert sorted(seat.init["rank_offset"] for seat in seats) in ([1, 2], [1, 3])
        workers = [at_rank(seat, extra) for seat, count in zip(seats, (1, 2), strict=True) for extra in range(count)]
        assert set(at_once(*(lambda one=one: received(one) for one in workers))) == {digest}
        later = take_seat(way, "c", 1)
        assert later.init["world_size"] == 2
        assert received(later) == digest
    assert sender.sent == 2
    with pytest.raises(NoSeat):
        take_seat(way.model_copy(update={"seconds": 1.0}), "d", 1)


def at_rank(seat: Seat, extra: int) -> Seat:
    """The seat of a replica's further worker."""
    return Seat(seat.init | {"rank_offset": seat.init["rank_offset"] + extra}, seat.update)


MEMBER_THAT_DIES = """
import os, signal, sys
from roundhouse.plugins.transfer.transport import take_seat
from roundhouse.plugins.transfer.transport import TransferSource
from tests.plugins.transfer.ends import described_in, end_of

seat = take_seat(TransferSource.model_validate_json(sys.argv[1]), "dying", 1)
for _ in end_of(seat).receive(described_in(seat), seat.init["packed_buffer_size_bytes"]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_when_one_of_a_group_is_killed_the_others_hear_of_it_and_the_next_group_is_whole(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    with file_sender(model, ["a", "dying"], SECONDS, 10_000) as sender:
        way = sender.source()
        dying = fork_server.start([sys.executable, "-c", MEMBER_THAT_DIES, way.model_dump_json()])
        try:
            # The one that dies comes first: its process takes longer to start than others wait for it.
            meeting = TCPStore(HERE, way.port, is_master=False)
            while not meeting.check([f"{way.key}/member/1"]):
                assert dying.poll() is None
                time.sleep(0.01)
            with pytest.raises(RuntimeError, match=r"(?i)connection|peer|socket"):
                received(take_seat(way, "a", 1))
            assert dying.wait(SECONDS) == -signal.SIGKILL
        finally:
            dying.kill()
            dying.wait()
        assert received(take_seat(way, "a", 1)) == digest_of_tensors(tensor_digests(weight_files(model)))
    assert sender.sent == 1


def test_where_nobody_gives_seats_the_time_limit_ends_the_wait(tmp_path: Path) -> None:
    sender = file_sender(make_model(tmp_path / "m"), ["a"], SECONDS)
    way = sender.source().model_copy(update={"seconds": 1.0})
    with pytest.raises(NoSeat, match=f"sender at {HERE}:{way.port} gave no seat within 1 s"):
        take_seat(way, "a", 1)


def test_where_packets_are_dropped_the_replica_reads_the_checkpoint_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a NetworkPolicy: connections are neither refused nor answered. Here the kernel drops packets beyond a full
    queue."""
    monkeypatch.setattr(transfer, "REACH_SECONDS", 0.5)
    with socket.create_server((HERE, 0), backlog=0) as silent:
        address = silent.getsockname()
        way = TransferSource(dtype="float32", address=HERE, port=address[1], key="k", replicas=["a"], seconds=SECONDS)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        begun = time.monotonic()
        with pytest.raises(NoSeat, match=r"cannot be reached: timed out.*k8s/components/weight-transfer"):
            take_seat(way, "a", 1)
        assert time.monotonic() - begun < SECONDS / 2
        for one in waiting:
            one.close()


SENDER = """
import sys, threading
from pathlib import Path
from tests.plugins.transfer.ends import file_sender

def held() -> int:
    [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

def watch() -> None:
    global most
    while not ended.wait(0.005):
        most = max(most, held())

ended, directory = threading.Event(), Path(sys.argv[1])
with file_sender(directory / "small", ["a"], 60) as sender:  # what torch takes for any group
    print(sender.source().model_dump_json(), flush=True)
    sys.stdin.readline()
before = most = held()
threading.Thread(target=watch).start()
with file_sender(directory / "large", ["a"], 60) as sender:
    print(sender.source().model_dump_json(), flush=True)
    sys.stdin.readline()
ended.set()
print(most - before)
"""


def test_a_sender_holds_a_few_batches_whatever_the_size_of_the_weights(tmp_path: Path) -> None:
    """Pages of the file, which it maps, are not counted: the system takes them back when it likes."""
    for name, tensors in (("small", 1), ("large", 24)):
        (tmp_path / name).mkdir()
        layers = {f"layer.{at:02d}": torch.full((2**22,), float(at)) for at in range(tensors)}  # 16 MiB each
        save_file(layers, tmp_path / name / "model.safetensors")
    command = [sys.executable, "-c", SENDER, str(tmp_path)]
    with fork_server.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        for name in ("small", "large"):
            way = TransferSource.model_validate_json(sender.stdout.readline())
            assert received(take_seat(way, "a", 1)) == digest_of_tensors(tensor_digests(weight_files(tmp_path / name)))
            sender.stdin.write("\n")
            sender.stdin.flush()
        held = int(sender.stdout.readline())
    assert held < 4 * BATCH_BYTES < 24 * 2**24


@pytest.fixture
def ends() -> tuple[GlooGroup, GlooGroup]:
    return group_of_two(SECONDS)


def group_of_two(seconds: float) -> tuple[GlooGroup, GlooGroup]:
    """Return the ends of a group: the sender and the receiver."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)

    def end(rank: int) -> GlooGroup:
        own = TCPStore(HERE, store.port, is_master=False)
        return GlooGroup(PrefixStore("g", own), rank, 2, HERE, seconds)

    first, second = at_once(lambda: end(0), lambda: end(1))
    first.store = store  # kept, as long as it is
    return first, second


def test_a_batch_that_does_not_come_in_time_ends_the_wait() -> None:
    _, receiver = ends = group_of_two(3)
    assert ends, "the sender stays in the group"
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        list(receiver.receive([Described("t", "float32", (4,))]))


def test_tensors_that_are_not_what_was_described_are_not_sent(ends: tuple[GlooGroup, GlooGroup]) -> None:
    with pytest.raises(ValueError, match="b came where a was described"):
        ends[0].send([Described("a", "float32", (2,))], [("b", torch.zeros(2))])
    with pytest.raises(ValueError, match="a came where a was described"):
        ends[0].send([Described("a", "float32", (2,))], [("a", torch.zeros(3))])


def test_the_meeting_is_at_the_address_that_replicas_are_told_and_at_no_other(tmp_path: Path) -> None:
    way = file_sender(make_model(tmp_path / "m"), ["a"], SECONDS).source()
    socket.create_connection((way.address, way.port), timeout=SECONDS).close()
    with pytest.raises(ConnectionRefusedError):  # by another address of this machine
        socket.create_connection(("127.0.0.2", way.port), timeout=SECONDS)


def test_a_way_names_those_that_it_is_for(tmp_path: Path) -> None:
    way = file_sender(make_model(tmp_path / "m"), ["a", "b"], 5, dtype="bfloat16").source()
    assert (way.replicas, way.seconds, way.dtype, way.address) == (["a", "b"], 5, "bfloat16", HERE)
    assert TransferSource.model_validate_json(way.model_dump_json()) == way
