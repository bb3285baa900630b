"""The transport `transfer`: weights straight from the trainer into the engines of replicas, by vLLM's interface.

Invariant: the sender has proved that its weights are the checkpoint's. A replica that joins the meeting is seated or
not within the source's time limit, and can always read the checkpoint instead. Nothing waits for a dead replica.

The sender is an idle trainer that holds these weights (`WeightHolder`), on any machine; its ranks send their rows
tensor by tensor. Otherwise the refitting process sends and reads the checkpoint once.

Replicas join after they finish their requests in flight. The sender forms a group when all replicas present at
publication have joined, or GATHER_SECONDS after the first; later ones form the next group.

    replica  joined += 1 -> n, member/n = {id, workers}      waits for seat/n
    sender   seat/n = {"init": …, "update": …}               arguments of vLLM's interface
    both     the group of the backend, one broadcast a batch

The meeting is a torch key-value store (TCPStore) in the sender's process, at one address. Like every torch group it is
neither encrypted nor authenticated: any process that reaches its port can list its keys, take a seat and read the
weights. The key separates meetings and is not a secret. The digest proves the received weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit

from roundhouse.config.models import RunConfig
from roundhouse.errors import ConfigError, InfraError, RoundhouseError
from roundhouse.plugins.transfer.gloo import BATCH_BYTES, GlooGroup, describe, own_address
from roundhouse.weight_sync.base import (
    Published,
    RunCheckpoint,
    WeightChange,
    WeightSource,
    WeightTransferFailed,
    checkpoint_source,
)
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.sending import Described, SendingTransport, TransferBegun, WeightHolder, WeightOffer
from roundhouse.weight_sync.tensor_files import digest_of, iterate

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

GATHER_SECONDS = 5.0
"""Time that joined replicas wait for others with paused engines."""
POLL_SECONDS = 0.01
REACH_SECONDS = 5.0
FIREWALL = "a firewall is between: in a cluster, k8s/components/weight-transfer lets engines to its pod"
"""Likely cause and remedy when a present sender cannot be reached."""
TRANSFER_SHARE = 0.25
"""Share of a refit's time limit for a transfer's meeting, and for each of its batches. The rest is left for reading the
checkpoint after a failure."""


class TransferSource(WeightSource):
    kind: str = "transfer"
    address: str
    """Address of the sender for replicas."""
    port: int
    key: str
    """Prefix of the meeting's keys."""
    replicas: list[str]
    """IDs of the replicas present at publication; the sender expects only these."""
    seconds: float
    """Time limit of the meeting, and of each batch."""


@runtime_checkable
class TransferEngine(Protocol):
    """An engine that takes the steps of vLLM's weight-transfer interface."""

    def transfer_workers(self) -> int:
        """Ranks that the engine takes in a group."""
        ...

    async def receive_weights(
        self, init: dict[str, Any], update: dict[str, Any], seconds: float, change: WeightChange
    ) -> tuple[str, int]:
        """Replace the weights by those of a group; `DirectTransport.receive` has the contract.

        Args:
            init, update: arguments of vLLM's `init_weight_transfer_engine` and `update_weights`.
            seconds: time limit of the group, and of each batch.
        """
        ...


class TransferOffer(WeightOffer):
    """Format and receivers of sent weights."""

    kind: str = "transfer"
    backend: Literal["gloo", "nccl"]
    replicas: list[str]
    """IDs of the expected replicas."""
    engine: str
    """URL: the sender is reached at its machine's address on the way there."""
    seconds: float
    """Time limit of a meeting, and of each batch."""
    batch_bytes: int = BATCH_BYTES


class TransferTransport(SendingTransport):
    """Into the engines that hold weights, or sleep, when the refit begins."""

    Source = TransferSource
    Offer = TransferOffer
    asks_replicas = True
    asks_trainer = True
    all_replicas_at_once = True

    def check(self, run: RunConfig) -> None:
        generation = run.generation
        if generation.backend != "vllm":
            raise ValueError(
                f"generation.weight_sync is transfer, into vLLM, but generation.backend is {generation.backend}. Set "
                "generation.backend to vllm, or generation.weight_sync to store."
            )
        if generation.transfer_backend == "nccl" and generation.gpus_per_replica == 0:
            raise ValueError(
                "generation.transfer_backend is nccl, but generation.gpus_per_replica is 0: nccl is between GPUs. Set "
                "generation.transfer_backend to gloo."
            )

    @contextmanager
    def publish(self, checkpoint: RunCheckpoint, replicas: Sequence[ReplicaReport]) -> Iterator[Published]:
        generation = checkpoint.run.config.generation
        present = [one.replica_id for one in replicas if one.ready or one.asleep]
        if not present or checkpoint.engine_url is None:
            with checkpoint.in_engine_format() as directory:
                yield Published(digest_of(directory), checkpoint_source(checkpoint.dtype))
            return
        offer = TransferOffer(
            dtype=checkpoint.dtype,
            backend=generation.transfer_backend,
            replicas=present,
            engine=checkpoint.engine_url,
            seconds=TRANSFER_SHARE * generation.refit_timeout_seconds,
        )
        with _sent_by_trainer(checkpoint, offer) as transfer:
            if transfer is not None:
                yield Published(transfer.digest, transfer.source)
                return
        with checkpoint.in_engine_format() as directory, Sender.of_files(directory, offer) as sender:
            yield Published(digest_of(directory), sender.source())

    @classmethod
    def sender(
        cls,
        described: Sequence[Described],
        tensors: Callable[[], Generator[tuple[str, torch.Tensor]]],
        offer: TransferOffer,
    ) -> Sender:
        return Sender(described, tensors, offer)

    @classmethod
    def check_replica(cls, engine: object, source: TransferSource, replica_id: str) -> None:
        if not isinstance(engine, TransferEngine):
            raise WeightTransferFailed("this engine takes no transfers", touched=False)
        if replica_id not in source.replicas:
            raise WeightTransferFailed("this replica was not there when the weights were published", touched=False)

    @classmethod
    async def receive(
        cls, engine: TransferEngine, source: TransferSource, replica_id: str, change: WeightChange
    ) -> tuple[str, int]:
        try:
            seat = await asyncio.to_thread(take_seat, source, replica_id, engine.transfer_workers())
        except NoSeat as error:
            raise WeightTransferFailed(str(error), touched=False) from error
        try:
            return await engine.receive_weights(seat.init, seat.update, source.seconds, change)
        except WeightTransferFailed as error:
            if error.touched:
                raise
            raise WeightTransferFailed(f"{error}. If it is still there, {FIREWALL}", touched=False) from error


class NoSeat(InfraError):
    """The meeting cannot be reached, or does not have a seat for this replica; its engine was not touched."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A replica's place in a group, as arguments of vLLM's interface."""

    init: dict[str, Any]
    update: dict[str, Any]


def take_seat(source: TransferSource, replica_id: str, workers: int) -> Seat:
    """Join the meeting and wait for the group.

    Raises:
        NoSeat: with the reason.
    """
    from torch.distributed import TCPStore

    try:
        # The store would try again and again until its limit.
        socket.create_connection((source.address, source.port), timeout=min(REACH_SECONDS, source.seconds)).close()
        limit = timedelta(seconds=source.seconds)
        store = TCPStore(source.address, source.port, is_master=False, timeout=limit, wait_for_workers=False)
        number = store.add(f"{source.key}/joined", 1)
        store.set(f"{source.key}/member/{number}", json.dumps({"replica": replica_id, "workers": workers}))
        seat = json.loads(store.get(f"{source.key}/seat/{number}"))
    except OSError as error:
        raise NoSeat(
            f"the sender at {source.address}:{source.port} cannot be reached: {error}. If it is still there, {FIREWALL}"
        ) from error
    except RuntimeError as error:  # torch's DistError: lost, or not in time
        raise NoSeat(
            f"the sender at {source.address}:{source.port} gave no seat within {source.seconds:g} s: {_first_line(error)}"
        ) from error
    return Seat(**seat)


@contextmanager
def _sent_by_trainer(checkpoint: RunCheckpoint, offer: TransferOffer) -> Iterator[TransferBegun | None]:
    """Let the trainer send during the block; yield None if no trainer can, or it holds other weights."""
    holder = checkpoint.trainer if isinstance(checkpoint.trainer, WeightHolder) else None
    digest, transfer = checkpoint.weights_digest, None
    if holder is not None and digest is not None:
        try:
            transfer = holder.begin_transfer(offer, digest)
        except RoundhouseError as error:
            logger.warning("The trainer does not send version %d: %s", checkpoint.reference.policy_version, error)
    try:
        yield transfer
    finally:
        if holder is not None and transfer is not None:
            try:
                holder.end_transfer()
            except RoundhouseError as error:  # a lost trainer raises again at its next training step
                logger.warning("The trainer did not end its transfer: %s", error)


class Sender:
    """Send weights to replicas until the context ends.

    Args:
        described: the tensors, in the order in which they are sent.
        tensors: yields them, once for each group; closed early if a group is lost.

    Raises:
        ConfigError: it must send from a GPU, and this process lacks one.
    """

    def __init__(
        self,
        described: Sequence[Described],
        tensors: Callable[[], Generator[tuple[str, torch.Tensor]]],
        offer: TransferOffer,
    ) -> None:
        from torch.distributed import TCPStore

        if offer.backend == "nccl":
            import torch

            if not torch.cuda.is_available():
                raise ConfigError(
                    "generation.transfer_backend is nccl, which sends from a GPU, but the sending process has none. "
                    "Set it to gloo."
                )
        self.sent = 0
        """Groups that were sent to, whole."""
        self._described, self._tensors, self._offer = list(described), tensors, offer
        parts = urlsplit(offer.engine)
        self._address = own_address(parts.hostname or "127.0.0.1", parts.port or 80)
        self._key = secrets.token_hex(16)
        # By itself the store would listen on every interface, whatever address it is given.
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listening = socket.create_server((self._address, 0), family=family)
        port = listening.getsockname()[1]
        self._store = TCPStore(
            self._address,
            port,
            is_master=True,
            timeout=timedelta(seconds=offer.seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._left = threading.Event()
        # A daemon: a thread stuck in a broadcast must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="weights-sender", daemon=True)

    @classmethod
    def of_files(cls, directory: Path, offer: TransferOffer) -> Sender:
        """Sends a directory's safetensors, which are in the engine's format."""
        described = [describe(name, tensor) for name, tensor in iterate(directory)]
        return cls(described, lambda: iterate(directory), offer)

    @property
    def seconds(self) -> float:
        """Time limit of a meeting, and of each batch."""
        return self._offer.seconds

    def source(self) -> TransferSource:
        """Return the source that leads replicas to the sender."""
        return TransferSource(
            dtype=self._offer.dtype,
            address=self._address,
            port=self._store.port,
            key=self._key,
            replicas=self._offer.replicas,
            seconds=self._offer.seconds,
        )

    def begin(self) -> None:
        """Start to seat joining replicas."""
        self._thread.start()

    def __enter__(self) -> Sender:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(2 * POLL_SECONDS if kind is not None else self.seconds)

    def end(self, patience: float) -> bool:
        """Form no group any more; whether the one under way came to its end within so many seconds."""
        self._left.set()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        served = 0
        while not self._left.is_set():
            if self._joined() == served:
                self._left.wait(POLL_SECONDS)
                continue
            deadline = time.monotonic() + min(GATHER_SECONDS, self.seconds / 2)
            while (came := self._joined()) < len(self._offer.replicas) and time.monotonic() < deadline:
                self._left.wait(POLL_SECONDS)
            last = max(came, served + 1)
            try:
                self._group(range(served + 1, last + 1))
                self.sent += 1
            except Exception as error:  # noqa: BLE001 (border of a group: its replicas read the checkpoint, the next may come)
                logger.warning("weights were not sent to replicas %d to %d: %s", served + 1, last, _first_line(error))
            served = last

    def _joined(self) -> int:
        return int(self._store.add(f"{self._key}/joined", 0))

    def _group(self, numbers: range) -> None:
        members = [json.loads(self._store.get(f"{self._key}/member/{number}")) for number in numbers]
        size = 1 + sum(member["workers"] for member in members)
        group, seconds = f"{self._key}/group/{numbers[0]}", self.seconds
        init = {
            "master_address": self._address,
            "world_size": size,
            "packed_buffer_size_bytes": self._offer.batch_bytes,
        }
        by_gloo = self._offer.backend == "gloo"
        if by_gloo:
            init |= {"master_port": self._store.port, "group": group, "seconds": seconds}
        else:
            with socket.socket() as probe:
                probe.bind((self._address, 0))
                init |= {"master_port": int(probe.getsockname()[1]), "packed": True}
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
        if by_gloo:
            from torch.distributed import PrefixStore, TCPStore

            limit = timedelta(seconds=seconds)
            # A separate connection: waiting on it must not block others at the meeting.
            own = TCPStore(self._address, self._store.port, is_master=False, timeout=limit, wait_for_workers=False)
            end = GlooGroup(PrefixStore(group, own), 0, size, self._address, seconds)
            with closing(self._tensors()) as tensors:
                end.send(self._described, tensors, self._offer.batch_bytes)
        else:
            with closing(self._tensors()) as tensors:
                _send_by_nccl(init, self._described, tensors)


class _SelfDriven:
    """vLLM's `VLLMWeightSyncClient`: each replica takes vLLM's steps by itself, so the sender's calls do nothing."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _send_by_nccl(
    init: dict[str, Any], described: Sequence[Described], tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Broadcast from this process's GPU, by vLLM's own sender, to the group that `init` names."""
    import torch
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Files(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(one.name, getattr(torch, one.dtype), one.shape) for one in described]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return ((name, tensor.cuda()) for name, tensor in tensors)

    fields = ("master_address", "master_port", "world_size", "packed", "packed_buffer_size_bytes")
    info = NCCLTrainerInitInfo(rank=0, **{name: init[name] for name in fields})
    engine = WeightTransferTrainerFactory.trainer_init(info, client=_SelfDriven(), source=Files())
    try:
        engine.send_weights()
    finally:
        engine.shutdown()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
