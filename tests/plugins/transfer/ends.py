"""A replica's end of a group without an engine: its worker's part with a seat. And a sender of files."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from roundhouse.plugins.transfer.gloo import BATCH_BYTES, GlooGroup, own_address
from roundhouse.plugins.transfer.transport import Seat, Sender, TransferOffer
from roundhouse.weight_sync.base import Dtype
from roundhouse.weight_sync.sending import Described


def offer_to(
    replicas: list[str], seconds: float, batch_bytes: int = BATCH_BYTES, dtype: Dtype = "float32"
) -> TransferOffer:
    """To replicas of this machine, by gloo."""
    return TransferOffer(
        dtype=dtype,
        backend="gloo",
        replicas=replicas,
        engine="http://127.0.0.1:1",
        seconds=seconds,
        batch_bytes=batch_bytes,
    )


def file_sender(
    directory: Path, replicas: list[str], seconds: float, batch_bytes: int = BATCH_BYTES, dtype: Dtype = "float32"
) -> Sender:
    """Return a sender of a directory's files, as in the process that refits."""
    return Sender.of_files(directory, offer_to(replicas, seconds, batch_bytes, dtype))


def end_of(seat: Seat) -> GlooGroup:
    """A replica's end, as its engine's worker opens it."""
    init = seat.init
    limit = timedelta(seconds=init["seconds"])
    store = TCPStore(init["master_address"], init["master_port"], is_master=False, timeout=limit)
    own = own_address(init["master_address"], init["master_port"])
    return GlooGroup(PrefixStore(init["group"], store), init["rank_offset"], init["world_size"], own, init["seconds"])


def described_in(seat: Seat) -> list[Described]:
    update = seat.update
    given = zip(update["names"], update["dtype_names"], update["shapes"], strict=True)
    return [Described(name, dtype, tuple(shape)) for name, dtype, shape in given]
