"""Data loaders: items in an order, with room for some to be put back.

Invariants: `len` is the number of items still to come; an item is given out once, unless it is added again; `reset` brings back
the loader as it was made, whatever was added since. A file's order is the file's, or with `shuffle` a function of the seed.

    loader = FileDataLoader("quiz.jsonl", repeat_n=2)     # a, a, b, b; each with group_id, run_id and task_id
    while (item := loader.get_next_item()) is not None: …
"""

from __future__ import annotations

import csv
import io
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse.errors import ConfigError, DataError

Item = dict[str, Any]
_MORE = "\0"
"""Under which cells beyond the columns come; no column has this name."""


class BaseDataLoader(ABC):
    """A queue of items."""

    def __init__(self, is_validate: bool = False) -> None:
        self.is_validate = is_validate
        """The items are for validation, not for training."""
        self._items: deque[Item] = deque()
        self.reset()

    @abstractmethod
    def load(self) -> Sequence[Item]:
        """All items in their first order."""

    def reset(self) -> None:
        self._items = deque(self.load())

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def get_next_item(self) -> Item | None:
        """The next item, which leaves the loader; None when there is none."""
        return self._items.popleft() if self._items else None

    def is_finished(self) -> bool:
        return not self._items

    def can_return_item(self) -> bool:
        """Whether an item can be had right now. A loader that waits for something overrides this."""
        return bool(self._items)

    def add_item(self, item: Item) -> None:
        self.add_item_back(item)

    def add_item_front(self, item: Item) -> None:
        self._items.appendleft(item)

    def add_item_back(self, item: Item) -> None:
        self._items.append(item)


class MockDataLoader(BaseDataLoader):
    """`count` made-up items."""

    def __init__(self, count: int = 16, is_validate: bool = False) -> None:
        self._count = count
        super().__init__(is_validate)

    def load(self) -> list[Item]:
        return [{"prompt": f"mock prompt {index}", "ground_truth": str(index)} for index in range(self._count)]


class FileDataLoader(BaseDataLoader):
    """The rows of a .parquet, .csv or .jsonl file, local or of any fsspec scheme; each `repeat_n` times.

    Copies of a row have the same `group_id` and `task_id` (the row's own `task_id`, or its number) and the `run_id`s 0, 1, ….
    """

    def __init__(
        self,
        uri: str,
        *,
        repeat_n: int = 1,
        shuffle: bool = False,
        seed: int = 42,
        is_validate: bool = False,
        key: str = "data",
    ) -> None:
        """`key` names the configuration key in errors.

        Raises:
            ConfigError: the file cannot be read, holds no rows, or has another ending.
            DataError: a line of it cannot be read.
        """
        self._rows = read_items(uri, key)
        self._repeat_n, self._shuffle, self._seed = repeat_n, shuffle, seed
        super().__init__(is_validate)

    def load(self) -> list[Item]:
        rows = list(self._rows)
        if self._shuffle:
            random.Random(self._seed).shuffle(rows)
        return [{**row, "run_id": run} for row in rows for run in range(self._repeat_n)]


def read_items(uri: str, key: str) -> list[Item]:
    """The rows of a file, each with `task_id` and `group_id`.

    Raises:
        ConfigError: the file cannot be read, holds no rows, or has another ending.
        DataError: a line of it cannot be read.
    """
    ending = uri.rpartition(".")[2]
    if ending not in _READERS:
        raise ConfigError(f"{key} is {uri!r}: a data file ends in .{', .'.join(_READERS)}.")
    try:
        with fsspec.open(uri, "rb") as file:
            rows = _READERS[ending](file.read())
    except DataError as error:
        raise DataError(f"{key} is {uri!r}: {error}") from error
    except (OSError, ValueError, ImportError, pa.ArrowException) as error:
        raise ConfigError(f"{key} is {uri!r}, which cannot be read: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{key} is {uri!r}, which holds no rows, or rows that are no objects.")
    named = [
        {**row, "task_id": str(index if row.get("task_id") is None else row["task_id"])}
        for index, row in enumerate(rows)
    ]
    if len({row["task_id"] for row in named}) < len(named):
        raise ConfigError(f"{key} is {uri!r}, in which several rows have the same task_id.")
    return [{"group_id": row["task_id"], **row} for row in named]


def _lines(raw: bytes) -> list[Any]:
    rows = []
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            rows += [orjson.loads(line)] if line.strip() else []
        except orjson.JSONDecodeError as error:
            raise DataError(f"line {number} is no JSON: {error}.") from error
    return rows


def _table(raw: bytes) -> list[Any]:
    reader = csv.DictReader(io.StringIO(raw.decode("utf-8-sig"), newline=""), restkey=_MORE)
    rows = []
    try:
        for row in reader:
            if more := row.pop(_MORE, None):
                raise DataError(
                    f"line {reader.line_num} has {len(more)} cells more than there are columns. Quote cells with commas."
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(
            f"line {reader.reader.line_num} cannot be read: {error}. Cells may have {csv.field_size_limit()} characters; "
            ".jsonl and .parquet have no such limit."
        ) from error
    return rows


def _parquet(raw: bytes) -> list[Any]:
    rows: list[Any] = pq.read_table(io.BytesIO(raw)).to_pylist()
    return rows


_READERS = {"jsonl": _lines, "csv": _table, "parquet": _parquet}
