"""Weights straight from one process into the engines of replicas: who comes, in which group, from whom.

Invariant: the checkpoint is read once, by the sender; a replica that comes to the meeting is given a seat in a group or is not,
within the way's time limit, and can always read the checkpoint instead. Nobody waits for a replica that has died.

Replicas come when they are able to: each first finishes what is running. So the sender forms a group of those that have come,
when all have that were there when the weights were offered, or GATHER_SECONDS after the first; those that come later are the
next group's.

    replica  joined += 1 -> n, member/n = {id, workers}      waits for seat/n
    sender   seat/n = {"init": …, "update": …}               what vLLM's engine is to be told, in the words of its interface
    both     the group of the backend, one broadcast a batch

The meeting is a key-value store of torch (TCPStore) in the sender's process, at the one address that it names to replicas. Like
every group of torch it is neither encrypted nor closed to whoever reaches its port, who can list its keys, take a seat and read
the weights: the key keeps meetings apart and is no secret. What came is proved by its digest.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from roundhouse.errors import InfraError
from roundhouse.weight_sync.base import Dtype, TransferWay
from roundhouse.weight_sync.gloo import BATCH_BYTES, GlooGroup
from roundhouse.weight_sync.packed import Described, describe
from roundhouse.weight_sync.tensor_file import weight_files

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

GATHER_SECONDS = 5.0
"""How long replicas that have come wait for others: their engines are still meanwhile."""
POLL_SECONDS = 0.01
REACH_SECONDS = 5.0


class NoSeat(InfraError):
    """The meeting cannot be reached, or has no seat for this replica; its engine was not touched."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica's place in a group, as vLLM's engine is told of it."""

    init: dict[str, Any]
    update: dict[str, Any]


def take_seat(way: TransferWay, replica_id: str, workers: int) -> Seat:
    """Come to the meeting and wait for the group.

    Raises:
        NoSeat: says why.
    """
    from torch.distributed import TCPStore

    try:
        # The store would try again and again until its limit.
        socket.create_connection((way.address, way.port), timeout=min(REACH_SECONDS, way.seconds)).close()
        limit = timedelta(seconds=way.seconds)
        store = TCPStore(way.address, way.port, is_master=False, timeout=limit, wait_for_workers=False)
        number = store.add(f"{way.key}/joined", 1)
        store.set(f"{way.key}/member/{number}", json.dumps({"replica": replica_id, "workers": workers}))
        seat = json.loads(store.get(f"{way.key}/seat/{number}"))
    except OSError as error:
        raise NoSeat(f"the sender at {way.address}:{way.port} is not there: {error}") from error
    except RuntimeError as error:  # torch's DistError: lost, or not in time
        raise NoSeat(f"no seat was given within {way.seconds:g} s: {_first_line(error)}") from error
    return Seat(**seat)


class Sender:
    """Offers a directory of weights to replicas, until its context is left.

    Args:
        directory: safetensors in the engine's format.
        expected: ids of the replicas that are there.
        address: this process's, as replicas reach it.
        seconds: time limit of a meeting, and of each batch.
    """

    def __init__(
        self,
        directory: Path,
        backend: str,
        expected: Sequence[str],
        address: str,
        seconds: float,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        from torch.distributed import TCPStore

        self.sent = 0
        """Groups that were sent to, whole."""
        self._files = weight_files(directory)
        self._described = list(_described(self._files))
        self._backend, self._expected, self._address = backend, list(expected), address
        self._seconds, self._batch_bytes = seconds, batch_bytes
        self._key = secrets.token_hex(16)
        limit = timedelta(seconds=seconds)
        # By itself the store would listen on every interface, whatever address it is given.
        listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listening.getsockname()[1]
        self._store = TCPStore(
            address, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._left = threading.Event()
        # A daemon: one that is stuck in a broadcast must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="weights-sender", daemon=True)

    def way(self, dtype: Dtype) -> TransferWay:
        return TransferWay(
            dtype=dtype,
            address=self._address,
            port=self._store.port,
            key=self._key,
            replicas=self._expected,
            seconds=self._seconds,
        )

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(timeout=2 * POLL_SECONDS if kind is not None else self._seconds)

    def _serve(self) -> None:
        served = 0
        while not self._left.is_set():
            if self._joined() == served:
                self._left.wait(POLL_SECONDS)
                continue
            last = self._gathered(served)
            try:
                self._group(range(served + 1, last + 1))
                self.sent += 1
            except Exception as error:  # noqa: BLE001 (border of a group: its replicas read the checkpoint, the next may come)
                logger.warning("weights were not sent to replicas %d to %d: %s", served + 1, last, _first_line(error))
            served = last

    def _joined(self) -> int:
        return int(self._store.add(f"{self._key}/joined", 0))

    def _gathered(self, served: int) -> int:
        deadline = time.monotonic() + min(GATHER_SECONDS, self._seconds / 2)
        while (came := self._joined()) < len(self._expected) and time.monotonic() < deadline:
            self._left.wait(POLL_SECONDS)
        return max(came, served + 1)

    def _group(self, numbers: range) -> None:
        members = [json.loads(self._store.get(f"{self._key}/member/{number}")) for number in numbers]
        size = 1 + sum(member["workers"] for member in members)
        group = f"{self._key}/group/{numbers[0]}"
        init = {"master_address": self._address, "world_size": size, "packed_buffer_size_bytes": self._batch_bytes}
        if self._backend == "gloo":
            init |= {"master_port": self._store.port, "group": group, "seconds": self._seconds}
        else:
            init |= {"master_port": _free_port(self._address), "packed": True}
        update = {
            "names": [one.name for one in self._described],
            "dtype_names": [one.dtype for one in self._described],
            "shapes": [list(one.shape) for one in self._described],
        }
        rank = 1
        for number, member in zip(numbers, members, strict=True):
            seat = {"init": init | {"rank_offset": rank}, "update": update}
            self._store.set(f"{self._key}/seat/{number}", json.dumps(seat))
            rank += member["workers"]
        if self._backend == "gloo":
            self._send_by_gloo(group, size)
        else:
            from roundhouse.weight_sync.nccl import send

            send(init, self._described, _tensors(self._files))

    def _send_by_gloo(self, group: str, size: int) -> None:
        from torch.distributed import PrefixStore, TCPStore

        limit = timedelta(seconds=self._seconds)
        # A connection of its own: a wait in it must not keep others from the meeting.
        own = TCPStore(self._address, self._store.port, is_master=False, timeout=limit, wait_for_workers=False)
        end = GlooGroup(PrefixStore(group, own), 0, size, self._address, self._seconds)
        end.send(self._described, _tensors(self._files), self._batch_bytes)


def _described(files: Sequence[Path]) -> Iterator[Described]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield describe(name, file.get_tensor(name))


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
