"""Convert NeMo Gym's files to a Parquet dataset of the store and back.

Invariants: each (task, rollout) makes one record: from its row in the rollouts file, otherwise from its newest failure.
An export returns every line unchanged: from the record alone if that is proved at import, from record and remnant, or
from the stored line. Lines are not stored for a dataset of Roundhouse, nor if the import proved that the export's rule
gives the same lines.

Stored lines have one row per line of a file: the file, the line's number, its rollout (none for an attempt that a later
one replaced), and the data without a place in the record.

    run.jsonl + run_failures.jsonl + run_materialized_inputs.jsonl  ->  <store>/datasets/<name>/<version>/

In an export every rollout is on exactly one line: of the rollouts
file if it has a reward, otherwise of the failures sidecar.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa

from roundhouse.environments.task_ids import unused_id
from roundhouse.errors import DataError
from roundhouse.plugins.nemo_gym.exchange.incoming import Remnant, foreign_rollout, is_own, restored_row, rollout_of
from roundhouse.plugins.nemo_gym.exchange.json_lines import (
    ROLLOUT,
    TASK,
    CollectionFiles,
    Row,
    iter_rows,
    line_of,
    write_rows,
)
from roundhouse.plugins.nemo_gym.exchange.outgoing import (
    OWN,
    Address,
    addresses,
    is_index,
    materialized_row,
    result_row,
    task_under,
)
from roundhouse.plugins.nemo_gym.exchange.statistics import aggregate_metrics, light
from roundhouse.rollout.protocol import FAILURE
from roundhouse.store.stage import Reference, read_manifest, read_table
from roundhouse.trajectories.foreign_files import ForeignRollouts, Head, Reader, Written
from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables

Key = tuple[int, int]
"""Task and rollout index."""


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    """The records of a collection and, unless they alone restore its files, their lines."""

    rollouts: list[Rollout]
    originals: list[Original]


@dataclass(slots=True)
class _Line:
    """A line of the rollouts file or the failures sidecar."""

    file: File
    number: int
    key: Key
    row: Row | None
    """None as soon as the record and `remnant` or `address` replace it: token arrays are not held twice."""
    own: bool
    rollout: Rollout | None = None
    """The record, if this line makes it."""
    remnant: Remnant | None = None
    address: Address | None = None
    """With it, the record alone gives the line back."""
    plain: bool = False
    """It is the address that the record gets in its dataset."""

    def original(self) -> Original:
        """Return the stored part of the line."""
        if self.rollout is not None and (self.plain or self.remnant is not None):
            return Original(self.file, self.number, self.rollout.rollout_id, self.remnant)
        row = self.row
        if row is None:
            assert self.rollout is not None
            assert self.address is not None
            row = result_row(self.rollout, self.address)
        return Original(self.file, self.number, row=row)


def read_collection(files: CollectionFiles, *, policy_version: int = 0) -> CollectedFiles:
    """Read the rollouts file and, if present, its sidecar and materialized inputs.

    Args:
        policy_version: of the weights that made foreign rollouts; Roundhouse's own rows have it.

    Raises:
        DataError: a file cannot be read, or holds a (task, rollout) twice.
    """
    # Line numbers, keys and rows of the materialized inputs; empty without this file
    input_indexes, result_indexes = _Indexes(), _Indexes()
    tasks = (
        [
            (number, input_indexes.key(row, number, files.materialized_inputs.name), row)
            for number, row in iter_rows(files.materialized_inputs)
        ]
        if files.materialized_inputs.exists()
        else []
    )
    _refuse_twice(files.materialized_inputs.name, [(number, key) for number, key, _ in tasks])
    converter = _Converter({key: row for _, key, row in tasks}, policy_version)
    judged = [converter.converted(line) for line in _lines("rollouts", files.rollouts, result_indexes)]
    _refuse_twice("the rollouts file", [(line.number, line.key) for line in judged])
    failures = list(_lines("failures", files.failures, result_indexes)) if files.failures.exists() else []
    known = {line.key for line in judged}
    newest = {line.key: line for line in failures if line.key not in known}
    failed = [converter.converted(line) for line in newest.values()]
    chosen = [*judged, *failed]
    if all(line.own for line in chosen):  # a dataset of Roundhouse; both files have its order
        places = [(0 if line.address is None else line.address.after, 0, line) for line in failed]
        places += [(place, 1, line) for place, line in enumerate(judged)]
        chosen = [line for _, _, line in sorted(places, key=lambda entry: entry[:2])]
    rollouts = [line.rollout for line in chosen if line.rollout is not None]
    in_order = [line for line in chosen if line.file == "failures"]
    same_lines = len(in_order) == len(failures) and all(map(operator.is_, in_order, failures))
    records: dict[Key, tuple[Rollout, Row]] = {}
    for line, rollout, place in zip(chosen, rollouts, addresses(rollouts), strict=True):
        line.plain = line.address == place
        records[line.key] = rollout, materialized_row(rollout, place)
    same_tasks = [row for _, _, row in tasks] == [records[key][1] for key in sorted(records)]
    originals: list[Original] = []  # empty if the records alone restore all lines, in their order
    if not (same_lines and same_tasks and all(line.plain for line in chosen)):
        originals = [line.original() for line in [*judged, *failures]] + [
            _original_task(number, row, records.get(key)) for number, key, row in tasks
        ]
    return CollectedFiles(rollouts, originals)


@dataclass(slots=True)
class _Converter:
    tasks: dict[Key, Row]
    policy_version: int
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    """Group ids by task_id and task index."""
    groups: set[str] = field(default_factory=set)

    def converted(self, line: _Line) -> _Line:
        """The line with its record."""
        assert line.row is not None
        if line.own:
            line.rollout = rollout_of(line.row)
            address = Address(*line.key, line.rollout.environment, line.row[OWN].get("after", 0))
            if result_row(line.rollout, address) == line.row:
                line.address, line.row = address, None
            return line
        task = self.tasks.get(line.key)
        task = task_under(task) if task is not None and is_own(task) else task
        line.rollout, line.remnant = foreign_rollout(line.row, task, key=line.key, policy_version=self.policy_version)
        line.row = None
        line.rollout.group_id = self._group_of(line.rollout.group_id, line.key[0])
        return line

    def _group_of(self, task_id: str, index: int) -> str:
        """Return the group of a task: two tasks with one task_id stay two groups."""
        if (task_id, index) not in self.names:
            group_id = unused_id(f"{task_id}#{index}", self.groups) if task_id in self.groups else task_id
            self.groups.add(group_id)
            self.names[task_id, index] = group_id
        return self.names[task_id, index]


def _lines(file: File, path: Path, indexes: _Indexes) -> Iterator[_Line]:
    return (
        _Line(file, number, indexes.key(row, number, path.name), row, is_own(row)) for number, row in iter_rows(path)
    )


@dataclass(slots=True)
class _Indexes:
    """Task and rollout indexes of rows: their own, or for all rows those of their order.

    Rows without `_ng_task_index` are one task if they have the same `task_id`. Rows without `_ng_rollout_index` are the
    rollouts of their task, in order.
    """

    first: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Place and value of each index field in the first row."""
    tasks: dict[str, int] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    rollouts: Counter[int] = field(default_factory=Counter)

    def key(self, row: Row, number: int, file: str) -> Key:
        """Return the key of the row on a line of a file.

        Raises:
            DataError: an index is not an integer from 0, or the row has an index that is missing from the rows before
                it.
        """
        place = f"{file}, line {number}"
        task, rollout = (self._own(name, row, place) for name in (TASK, ROLLOUT))
        if task is None:
            task = self._generated_task(row, number)
        if rollout is None:
            rollout = self.rollouts[task]
            self.rollouts[task] += 1
        return task, rollout

    def _own(self, name: str, row: Row, place: str) -> int | None:
        index = row.get(name)
        if index is not None and not is_index(index):
            raise DataError(
                f"{place}: {name} is {index!r:.80}. Give a whole number from 0, or leave it out of all rows."
            )
        first, value = self.first.setdefault(name, (place, index))
        if (value is None) != (index is None):
            without, having = (place, first) if index is None else (first, place)
            raise DataError(
                f"{without} has no {name} (it is null or missing), but {having} has one. Set it in all rows or in no row."
            )
        return index

    def _generated_task(self, row: Row, number: int) -> int:
        task_id = row.get("task_id")
        if task_id is not None and str(task_id) in self.tasks:
            return self.tasks[str(task_id)]
        task = number - 1
        while task in self.used:
            task += 1
        self.used.add(task)
        if task_id is not None:
            self.tasks[str(task_id)] = task
        return task


def _refuse_twice(where: str, keys: Sequence[tuple[int, Key]]) -> None:
    first: dict[Key, int] = {}
    for number, key in keys:
        if first.setdefault(key, number) != number:
            raise DataError(
                f"Task {key[0]}, rollout {key[1]} stands on lines {first[key]} and {number} of {where}. Remove one of them."
            )


def _original_task(number: int, row: Row, given: tuple[Rollout, Row] | None) -> Original:
    if given is not None and given[0].task == row:
        return Original("materialized_inputs", number, given[0].rollout_id)
    return Original("materialized_inputs", number, row=row)


DATASET = "nemo_gym"
"""Name of the table in its stage."""

File = Literal["rollouts", "failures", "materialized_inputs"]
FILES: tuple[File, ...] = ("rollouts", "failures", "materialized_inputs")

ORIGINALS = pa.schema(
    [
        ("file", pa.string()),
        ("line", pa.int32()),
        ("rollout_id", pa.string()),
        ("remnant", pa.string()),  # JSON; null if the row is the record's task (materialized inputs)
        ("row", pa.string()),  # JSON: the whole row, if no record replaces it
    ]
)


@dataclass(frozen=True, slots=True)
class Original:
    """One line of an imported file."""

    file: File
    line: int
    rollout_id: str | None = None
    remnant: Remnant | None = None
    row: Row | None = None


def originals_table(originals: Sequence[Original]) -> pa.Table:
    """The `nemo_gym` dataset."""
    rows = [
        {
            "file": one.file,
            "line": one.line,
            "rollout_id": one.rollout_id,
            "remnant": None
            if one.remnant is None
            else _text({field.name: getattr(one.remnant, field.name) for field in fields(one.remnant)}),
            "row": None if one.row is None else _text(one.row),
        }
        for one in originals
    ]
    return pa.Table.from_pylist(rows, schema=ORIGINALS)


def originals_from_table(table: pa.Table) -> list[Original]:
    """The lines that the dataset was read from, as they were written."""
    return [
        Original(
            file=row["file"],
            line=row["line"],
            rollout_id=row["rollout_id"],
            remnant=None if row["remnant"] is None else Remnant(**orjson.loads(row["remnant"])),
            row=None if row["row"] is None else orjson.loads(row["row"]),
        )
        for row in table.to_pylist()
    ]


def _text(value: dict[str, Any]) -> str:
    return line_of(value).decode().rstrip("\n")


def read_files(files: Sequence[Path], options: None, policy_version: int) -> ForeignRollouts:
    """Read the files of a collection (`reader.nemo_gym`).

    Raises:
        DataError: a file cannot be read, or holds a (task, rollout) twice; or they are several collections.
    """
    if len(files) != 1:
        raise DataError(f"A version is of one rollouts file, not of {len(files)}: {files[0]} … Name one of them.")
    collection = read_collection(CollectionFiles(files[0]), policy_version=policy_version)
    tables = {DATASET: originals_table(collection.originals)} if collection.originals else {}
    return ForeignRollouts(collection.rollouts, tables)


def _is_rollouts_file(head: Head) -> bool:
    return "responses_create_params" in head.row and not head.row.keys().isdisjoint(
        ("response", "reward", FAILURE, OWN)
    )


def _companions(path: Path) -> list[Path]:
    files = CollectionFiles(path)
    return [files.failures, files.materialized_inputs]


READER = Reader(_is_rollouts_file, "rollouts.jsonl", _companions)


@dataclass(frozen=True, slots=True)
class Exported:
    """Written files and counts."""

    files: CollectionFiles
    rollouts: int
    failures: int


def export_rollouts(
    reference: Reference, directory: Path, *, stem: str = "rollouts", agent: str | None = None
) -> Exported:
    """Write a complete collect or evaluate stage to `<directory>/<stem>*.jsonl` and its aggregate metrics.

    Args:
        agent: instance name for the `agent_ref` of tasks without one; by default the rollout's environment.
    """
    rollouts = rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))
    originals: list[Original] = []
    if any(entry.path.startswith(f"{DATASET}-") for entry in read_manifest(reference).files):
        originals = originals_from_table(read_table(reference, DATASET))
    return write_collection(rollouts, originals, CollectionFiles(directory / f"{stem}.jsonl"), agent)


def write_files(reference: Reference, directory: Path, agent: str | None) -> Written:
    """Write a complete collect or evaluate stage as NeMo Gym's files (`writer.nemo_gym`)."""
    exported = export_rollouts(reference, directory, agent=agent)
    return Written(exported.files.rollouts, exported.rollouts, exported.failures)


def write_collection(
    rollouts: Sequence[Rollout], originals: Sequence[Original], files: CollectionFiles, agent: str | None = None
) -> Exported:
    """Write records, and what their import kept with them, as the files of a collection."""
    pairs = list(zip(rollouts, addresses(rollouts, agent), strict=True))
    if originals:
        lines = _original_lines(pairs, originals)
    else:
        in_order = sorted(pairs, key=lambda pair: (pair[1].task_index, pair[1].rollout_index))
        lines = {
            "rollouts": (result_row(*pair) for pair in pairs if pair[0].reward is not None),
            "failures": (result_row(*pair) for pair in pairs if pair[0].reward is None),
            "materialized_inputs": (materialized_row(*pair) for pair in in_order),
        }
    light_rows: list[Row] = []
    succeeded = write_rows(files.rollouts, _noted(lines["rollouts"], light_rows))
    failed = write_rows(files.failures, lines["failures"])
    write_rows(files.materialized_inputs, lines["materialized_inputs"])
    metrics = metrics_by_agent(light_rows)
    files.aggregate_metrics.write_bytes(orjson.dumps(metrics, option=orjson.OPT_INDENT_2))
    return Exported(files, succeeded, failed)


def metrics_by_agent(light_rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The aggregate metrics file: an entry an agent."""
    by_agent: dict[str, list[Row]] = {}
    for row in light_rows:
        agent = row.get("agent_ref")
        name = agent.get("name") if isinstance(agent, dict) else None
        by_agent.setdefault(str(name or "agent"), []).append(row)
    return [{"agent_ref": {"name": name}, **aggregate_metrics(own)} for name, own in by_agent.items()]


def _noted(rows: Iterator[Row], light_rows: list[Row]) -> Iterator[Row]:
    """Yield the rows unchanged, and collect the data for statistics."""
    for row in rows:
        light_rows.append(light(row))
        yield row


def _original_lines(
    pairs: Sequence[tuple[Rollout, Address]], originals: Sequence[Original]
) -> dict[File, Iterator[Row]]:
    records = {rollout.rollout_id: (rollout, place) for rollout, place in pairs}

    def row_of(original: Original) -> Row:
        if original.row is not None:
            return original.row
        assert original.rollout_id is not None
        rollout, place = records[original.rollout_id]
        if original.file == "materialized_inputs":
            return rollout.task
        return result_row(rollout, place) if original.remnant is None else restored_row(rollout, original.remnant)

    def lines(file: File) -> Iterator[Row]:
        return (row_of(one) for one in sorted(originals, key=lambda one: one.line) if one.file == file)

    return {file: lines(file) for file in FILES}
