"""JSON lines files of task rows and rollouts: one object a line, each line whole before the next begins.

Invariant: a line that was written is on disk (flushed) before the writer returns. A writer that died in the middle of a line
leaves a torn tail; reading for a resume drops it, and opening for appending cuts it off, so that the next line is whole.

    {"a":1}
{"a":2}
{"a"    ->  read_rows(torn_tail=True): two rows;  Appender: cut after the second line

The names of a collection's files, all made of the rollouts file's.

out/run.jsonl  ->  out/run_materialized_inputs.jsonl   out/run_failures.jsonl         out/run_aggregate_metrics.json
                   out/run_reward_profiling.jsonl      out/run_agent_metrics.json
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from roundhouse.errors import ConfigError, DataError
from roundhouse.text_files import iter_lines, parse_json

Row = dict[str, Any]
Key = tuple[int, int]
"""A rollout's task index and rollout index."""

TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"

_BLOCK = 1 << 16


def key_of(row: Row) -> Key:
    return row[TASK], row[ROLLOUT]


def iter_rows(uri: str | Path, *, torn_tail: bool = False) -> Iterator[tuple[int, Row]]:
    """Yield line numbers (from 1) and objects of a file, local or of any fsspec scheme; empty lines are skipped.

    Args:
        torn_tail: leave out a last line without newline that is not JSON, as an interrupted writer leaves it.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object; the text names the line.
    """
    for number, line in iter_lines(uri):
        if torn_tail and not line.endswith(b"\n") and not _is_json(line):
            return
        row = parse_json(line, f"{uri}, line {number}")
        if not isinstance(row, dict):
            raise DataError(f"{uri}, line {number} is a {type(row).__name__}; each line must be a JSON object.")
        yield number, row


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def read_rows(uri: str | Path, *, torn_tail: bool = False) -> list[Row]:
    """All objects of a file; see `iter_rows`."""
    return [row for _, row in iter_rows(uri, torn_tail=torn_tail)]


def line_of(row: Row) -> bytes:
    """The row as a line.

    Raises:
        DataError: it holds what JSON lines cannot, such as an integer beyond 64 bits.
    """
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise DataError(f"A row cannot be written as JSON: {error}. Its keys: {', '.join(map(str, row))}.") from error


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write a whole file under a temporary name and put it in place; how many rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with temporary.open("wb") as file:
            for row in rows:
                file.write(line_of(row))
                count += 1
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


class Appender:
    """Appends rows to a file, each flushed; a context manager. A torn tail of an earlier writer is cut off first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        mend_tail(path)
        self._file = path.open("ab")

    def append(self, row: Row) -> None:
        self._file.write(line_of(row))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def mend_tail(path: Path) -> None:
    """Make the file end with a whole line: a last line without newline gets one if it is JSON, and is cut off if not."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        start = _start_of_tail(file)
        file.seek(start)
        tail = file.read()
        if not tail:
            return
        if _is_json(tail):
            file.write(b"\n")
        else:
            file.truncate(start)


def _start_of_tail(file: Any) -> int:
    """Offset after the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


@dataclass(frozen=True, slots=True)
class CollectionFiles:
    """The files that accompany a rollouts file."""

    rollouts: Path

    @property
    def materialized_inputs(self) -> Path:
        return self._beside("materialized_inputs.jsonl")

    @property
    def failures(self) -> Path:
        return self._beside("failures.jsonl")

    @property
    def aggregate_metrics(self) -> Path:
        return self._beside("aggregate_metrics.json")

    @property
    def reward_profile(self) -> Path:
        return self._beside("reward_profiling.jsonl")

    @property
    def agent_metrics(self) -> Path:
        return self._beside("agent_metrics.json")

    @property
    def repeat_metrics(self) -> Path:
        return self._beside("repeat_level_metrics.json")

    def _beside(self, ending: str) -> Path:
        return self.rollouts.with_name(f"{self.rollouts.stem}_{ending}")


def refuse_own(option: str, read: Path, output: Path, written: Iterable[Path]) -> None:
    """
    Raises:
        ConfigError: `read`, which `option` names, is one of the files that are written for --output.
    """
    if read.resolve() in {path.resolve() for path in written}:
        raise ConfigError(f"{option} reads {read}, which --output {output} would write over. Name another --output.")
