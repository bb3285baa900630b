"""Rows of a data file: JSON lines, CSV or Parquet, on this machine or in a bucket.

Invariant: a file is read exactly or refused with its key and the line at fault.

    read_rows("rows.jsonl", "environment.data")     [{"question": "2+2?", "answer": "4"}, …]
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

import fsspec
import pyarrow as pa

from roundhouse.errors import ConfigError, DataError
from roundhouse.store.stage import parse_parquet
from roundhouse.text_files import decode_text, numbered_lines, parse_json

_MORE = "\0"
"""Name of the cells beyond the columns; no column has this name."""


def read_rows(uri: str, key: str, *, typed: bool = False) -> list[Any]:
    """Return the rows of a file; its ending decides how it is read.

    Args:
        key: configuration key of the file, for errors.
        typed: read numbers and truth values of a CSV file as such, as Hugging Face `datasets` does, instead of as texts.

    Raises:
        ConfigError: the file cannot be read, or has another ending.
        DataError: a line cannot be read.
    """
    ending = uri.rpartition(".")[2]
    readers = READERS | ({"csv": _typed_table} if typed else {})
    if ending not in readers:
        raise ConfigError(f"{key} is {uri!r}: a data file ends in .{', .'.join(readers)}.")
    try:
        with fsspec.open(uri, "rb") as file:
            return readers[ending](file.read())
    except DataError as error:
        raise DataError(f"{key} is {uri!r}: {error}") from error
    except (OSError, ValueError, OverflowError, ImportError, pa.ArrowException) as error:
        raise ConfigError(f"{key} is {uri!r}, which cannot be read: {error}") from error


def _lines(raw: bytes) -> list[Any]:
    return [parse_json(line, f"line {number}") for number, line in numbered_lines([raw], "the file")]


def _table(raw: bytes) -> list[Any]:
    reader = csv.DictReader(io.StringIO(decode_text(raw, "the file"), newline=""), restkey=_MORE, strict=True)
    rows = []
    try:
        _refuse_repeated(reader.fieldnames or ())
        for row in reader:
            if more := row.pop(_MORE, None):
                raise DataError(f"line {reader.line_num} has {len(more)} cells too many. Quote cells with commas.")
            rows.append(row)
    except csv.Error as error:
        raise DataError(
            f"line {reader.reader.line_num} cannot be read: {error}. Cells may have {csv.field_size_limit()} characters; "
            ".jsonl and .parquet have no limit."
        ) from error
    return rows


def _typed_table(raw: bytes) -> list[Any]:
    from pyarrow import csv as arrow_csv

    decode_text(raw, "the file")  # names the line of a byte that is not UTF-8
    parsing = arrow_csv.ParseOptions(newlines_in_values=True)
    return _rows_of(arrow_csv.read_csv(pa.BufferReader(raw), parse_options=parsing))


def _rows_of(table: pa.Table) -> list[Any]:
    _refuse_repeated(table.column_names)
    return table.to_pylist()


def _refuse_repeated(columns: Sequence[str]) -> None:
    """Refuse two columns of one name: a row would keep the last one."""
    if repeated := sorted({name for name in columns if columns.count(name) > 1}):
        raise DataError(f"the column {repeated[0]!r} is given twice. Rename or remove one.")


READERS: dict[str, Callable[[bytes], list[Any]]] = {
    "jsonl": _lines,
    "csv": _table,
    "parquet": lambda raw: _rows_of(parse_parquet(raw)),
}
"""By the ending of the file's name."""
