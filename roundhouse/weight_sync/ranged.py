"""Objects of a bucket, read in ranges by several threads: one connection is slower than the network.

Invariant: when `download` returns, every file has its object's size. That the bytes are the wanted ones is shown by their
digests, not here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roundhouse.errors import DataError
from roundhouse.store.location import Location

RANGE_BYTES = 16 * 2**20
THREADS = 8


def download(source: Location, sizes: Mapping[str, int], directory: Path, threads: int = THREADS) -> None:
    """Copy objects of known sizes to a local directory.

    Raises:
        StoreError: an object is missing, or the store does not answer.
        DataError: an object is shorter than said.
    """
    if source.is_local:
        source.download(list(sizes), directory)
        return
    files = {name: os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for name in sizes}
    try:
        for name, size in sizes.items():
            os.ftruncate(files[name], size)

        def fetch(wanted: tuple[str, int, int]) -> None:
            name, begin, end = wanted
            data = source.read_range(name, begin, end)
            if len(data) != end - begin:
                raise DataError(
                    f"{source.uri}/{name} is not what its manifest says: it ends at byte {begin + len(data)} of {sizes[name]}. "
                    "Restore it."
                )
            os.pwrite(files[name], data, begin)

        with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
            for _ in pool.map(fetch, _ranges(sizes)):
                pass
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _ranges(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for name, size in sizes.items():
        for begin in range(0, size, RANGE_BYTES):
            yield name, begin, min(size, begin + RANGE_BYTES)
