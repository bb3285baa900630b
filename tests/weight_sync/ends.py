"""A replica's end of a group, without an engine: what its worker does with a seat."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from roundhouse.weight_sync.gloo import Described, GlooGroup, own_address
from roundhouse.weight_sync.transfer import Seat


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
