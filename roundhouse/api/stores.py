"""Find the store that a program or a command means."""

from __future__ import annotations

import os

from roundhouse.errors import StoreError

DEFAULT_STORE = ".roundhouse/store"
STORE_VARIABLE = "ROUNDHOUSE_STORE"


def named_store(store: str | os.PathLike[str] | None) -> str:
    """Return `store` or, without one, ROUNDHOUSE_STORE or the default.

    Raises:
        StoreError: it is a directory that does not exist, which would look like an empty store. A bucket is not asked.
    """
    from roundhouse.store.location import Location

    name = os.fspath(store) if store is not None else os.environ.get(STORE_VARIABLE) or DEFAULT_STORE
    if (place := Location(name)).is_local and not place.local_path.is_dir():
        raise StoreError(
            f"No store at {place.local_path}. Name one with --store or {STORE_VARIABLE} (in Python with store=…); without it "
            f"is {DEFAULT_STORE} in the working directory, where `roundhouse train` makes it."
        )
    return name
