"""Files of rollouts that other systems wrote: the interface of readers and writers, and checked JSON.

Invariant: a reader invents nothing. A field that a file lacks is absent, a rollout without a reward is a failure with the code
`no_reward`, and a value of another type is an error that names file, line and key. Data without a column of ours is kept in the
table `foreign`, with the place that it was read from.

    plug-in `reader.NAME`     factory(files, options, policy_version) -> ForeignRollouts    traits: a Reader
    plug-in `writer.NAME`     factory(stage, directory, agent) -> Written
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from roundhouse.errors import DataError
from roundhouse.text_files import numbered_lines, parse_json
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.storable import json_text, shown

NO_REWARD = "no_reward"
"""Failure code of a rollout whose file has no reward. A verdict can give it one (`roundhouse rescore`)."""
MOST_BYTES = 2**30
"""Size of one JSON document, on a line or in a file."""
FOREIGN = pa.schema([("rollout_id", pa.string()), ("place", pa.string()), ("fields", pa.string())])
"""The dataset `foreign`: file and line of each rollout, and as JSON the fields that no column of ours holds."""

Row = dict[str, Any]
ModelT = TypeVar("ModelT", bound="ForeignModel")


@dataclass(frozen=True, slots=True)
class Head:
    """Beginning of a file, from which a reader recognises its format."""

    path: Path
    row: Mapping[str, Any] = field(default_factory=dict)
    """The first JSON object; empty for another file."""
    columns: frozenset[str] = frozenset()
    """Columns of a Parquet file; empty for another file."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Facts about a reader that are known before it reads."""

    recognises: Callable[[Head], bool]
    files: str
    """Its files in a directory, as a pattern of `Path.glob`."""
    companions: Callable[[Path], Sequence[Path]] = lambda _: ()
    """Further files that it reads with one, if they exist."""


@dataclass(frozen=True, slots=True)
class ForeignRollouts:
    """The rollouts of files, in their order."""

    rollouts: Sequence[Rollout]
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    """Further datasets of the stage by name."""
    note: str = ""
    """Remark for the person who imports, such as the number of documents that are no rollouts."""


@dataclass(frozen=True, slots=True)
class Written:
    """Result of a writer."""

    file: Path
    """The file, or the directory of the files."""
    rollouts: int
    failures: int


class ForeignModel(BaseModel):
    """Base of the objects in foreign JSON: values are not converted, numbers are finite, unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


def checked(model: type[ModelT], value: Any, place: str) -> ModelT:
    """Return a value as a model.

    Raises:
        DataError: a key is missing or has another type; names place, key and value.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the value"
        value_text = "" if first["type"] == "missing" else f", and is {shown(first['input'])}"
        raise DataError(f"{place}: {key}: {first['msg'].lower()}{value_text}. Correct or remove it.") from None


def documents(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the JSON objects of a file with their places: one a line, or one that fills the file.

    Raises:
        DataError: the file cannot be read, or a document is not a JSON object or larger than `MOST_BYTES`.
    """
    try:
        with path.open("rb") as file:
            first = next((line for _, line in _lines(file, path)), b"")
            file.seek(0)
            if _is_json(first) or not first:
                rows = ((f"{path}, line {number}", line) for number, line in _lines(file, path))
            else:
                rows = ((str(path), _bounded(file.read(MOST_BYTES + 1), str(path))) for _ in range(1))
            for place, data in rows:
                row = parse_json(data, place)
                if not isinstance(row, dict):
                    raise DataError(f"{place} is a {type(row).__name__}, not a JSON object. Correct or remove it.")
                yield place, row
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Check the path.") from error


def _lines(file: Any, path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in numbered_lines(iter(lambda: file.readline(MOST_BYTES + 1), b""), str(path)):
        yield number, _bounded(line, f"{path}, line {number}")


def _bounded(data: bytes, place: str) -> bytes:
    if len(data) > MOST_BYTES:
        raise DataError(f"{place} is longer than {MOST_BYTES >> 20} MiB. Split the document.")
    return data


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class Identities:
    """Group IDs and sample numbers of foreign rollouts, and the check that each document is imported once."""

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()
        self._places: dict[tuple[str, str], str] = {}

    def next_sample(self, group: str) -> int:
        """Return the number of the next rollout of a group."""
        self._samples[group] += 1
        return self._samples[group] - 1

    def register(self, key: str, value: str | None, place: str) -> None:
        """Record an identifier that is unique in the files; None is not one.

        Raises:
            DataError: it was given before; names both places.
        """
        if value is None:
            return
        if (before := self._places.setdefault((key, value), place)) != place:
            raise DataError(f"{place}: {key} {value!r:.200} is that of {before}, too. Remove one of the two.")


def digest_id(prefix: str, value: Any) -> str:
    """Return an ID of a JSON value, equal for equal values."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def foreign_table(rows: Sequence[tuple[str, str, Row]]) -> dict[str, pa.Table]:
    """Return the dataset `foreign` of (rollout ID, place, fields)."""
    table = [{"rollout_id": own, "place": place, "fields": json_text(fields)} for own, place, fields in rows]
    return {"foreign": pa.Table.from_pylist(table, schema=FOREIGN)}
