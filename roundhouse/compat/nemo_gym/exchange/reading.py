"""A collection's files as rollout records, and the lines that the records alone would not give back.

Invariants: each (task, rollout) makes one record: of its row in the rollouts file, otherwise of its newest failure. Every line
comes back equal from an export: by the record alone where that is proven here, by record and remnant, or by the line itself.

What an imported dataset keeps of the files it came from, in addition to its rollouts and turns.

Invariant: with it, an export gives back the imported files, line for line. A dataset that Roundhouse collected has none, nor
has one whose import could prove that the export's own rule gives the same lines.

One row a line of a file: the file, the line's number, the rollout that it made (none for an attempt that a later one
replaced), and what the record has no place for.

NeMo Gym's files into a Parquet dataset of the store: a collect stage that validation and training read.

Invariant: the dataset gives back its files (`to_files`), equal value by value. A name and version that exist are not written
again: they are what they were.

    run.jsonl + run_failures.jsonl + run_materialized_inputs.jsonl  ->  <store>/datasets/<name>/<version>/

A Parquet dataset of rollouts as NeMo Gym's files.

Invariant: every rollout is on exactly one line: of the rollouts file if it has a reward, otherwise of the failures sidecar. An
imported dataset gives back the files that it came from.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa

from roundhouse.compat.nemo_gym.exchange.incoming import Remnant, foreign_rollout, is_own, restored_row, rollout_of
from roundhouse.compat.nemo_gym.exchange.json_lines import (
    ROLLOUT,
    TASK,
    CollectionFiles,
    Row,
    iter_rows,
    line_of,
    write_rows,
)
from roundhouse.compat.nemo_gym.exchange.outgoing import (
    OWN,
    Address,
    addresses,
    is_index,
    materialized_row,
    result_row,
    task_under,
)
from roundhouse.compat.nemo_gym.exchange.statistics import aggregate_metrics, light
from roundhouse.errors import DataError, StoreError
from roundhouse.store.lineage import code_version
from roundhouse.store.location import Location
from roundhouse.store.stage import Provenance, Reference, Stage, StageKind, read_manifest, read_table
from roundhouse.trajectories.records import Ledger, Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables, rollouts_table, turns_table

Key = tuple[int, int]
"""Task and rollout index."""


@dataclass(frozen=True, slots=True)
class CollectedFiles:
    """The records of a collection and, unless they alone give back its files, their lines."""

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
        """What is kept of the line."""
        if self.rollout is not None and (self.plain or self.remnant is not None):
            return Original(self.file, self.number, self.rollout.rollout_id, self.remnant)
        row = self.row
        if row is None:
            assert self.rollout is not None
            assert self.address is not None
            row = result_row(self.rollout, self.address)
        return Original(self.file, self.number, row=row)


def read_collection(files: CollectionFiles, *, policy_version: int = 0) -> CollectedFiles:
    """Read the rollouts file and, where they are, its sidecar and materialized inputs.

    Args:
        policy_version: of the weights that made foreign rollouts; Roundhouse's own rows say it.

    Raises:
        DataError: a file cannot be read, or holds a (task, rollout) twice.
    """
    # Line numbers, keys and rows of the materialized inputs; none if there is no such file
    tasks = (
        [(number, _key(row, number), row) for number, row in iter_rows(files.materialized_inputs)]
        if files.materialized_inputs.exists()
        else []
    )
    _refuse_twice(files.materialized_inputs.name, [(number, key) for number, key, _ in tasks])
    converter = _Converter({key: row for _, key, row in tasks}, policy_version)
    judged = [converter.converted(line) for line in _lines("rollouts", files.rollouts)]
    _refuse_twice("the rollouts file", [(line.number, line.key) for line in judged])
    failures = list(_lines("failures", files.failures)) if files.failures.exists() else []
    known = {line.key for line in judged}
    newest = {line.key: line for line in failures if line.key not in known}
    failed = [converter.converted(line) for line in newest.values()]
    chosen = [*judged, *failed]
    if all(line.own for line in chosen):  # a dataset of ours, whose order both files keep
        places = [(0 if line.address is None else line.address.after, 0, line) for line in failed]
        places += [(place, 1, line) for place, line in enumerate(judged)]
        chosen = [line for _, _, line in sorted(places, key=lambda entry: entry[:2])]
    rollouts = [line.rollout for line in chosen if line.rollout is not None]
    in_order = [line for line in chosen if line.file == "failures"]
    same_lines = len(in_order) == len(failures) and all(map(operator.is_, in_order, failures))
    given: dict[Key, tuple[Rollout, Row]] = {}
    for line, rollout, place in zip(chosen, rollouts, addresses(rollouts), strict=True):
        line.plain = line.address == place
        given[line.key] = rollout, materialized_row(rollout, place)
    same_tasks = [row for _, _, row in tasks] == [given[key][1] for key in sorted(given)]
    originals: list[Original] = []  # none where the records alone give back all lines, in their order
    if not (same_lines and same_tasks and all(line.plain for line in chosen)):
        originals = [line.original() for line in [*judged, *failures]] + [
            _original_task(number, row, given.get(key)) for number, key, row in tasks
        ]
    return CollectedFiles(rollouts, originals)


@dataclass(slots=True)
class _Converter:
    tasks: dict[Key, Row]
    policy_version: int
    groups: dict[str, int] = field(default_factory=dict)
    """Group ids and the task that each belongs to."""

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
        if self.groups.setdefault(line.rollout.group_id, line.key[0]) != line.key[0]:
            line.rollout.group_id += f"#{line.key[0]}"  # two tasks of one task_id stay two groups
        return line


def _lines(file: File, path: Path) -> Iterator[_Line]:
    return (_Line(file, number, _key(row, number), row, is_own(row)) for number, row in iter_rows(path))


def _key(row: Row, number: int) -> Key:
    """Task and rollout index; a row without them is a task of its own, numbered by its line."""
    task, rollout = row.get(TASK), row.get(ROLLOUT)
    return (row[TASK], row[ROLLOUT]) if is_index(task) and is_index(rollout) else (number - 1, 0)


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
        ("remnant", pa.string()),  # JSON; null where the row is the record's task (materialized inputs)
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


PART_ROLLOUTS = 1024
"""Rollouts in one Parquet part."""


def import_rollouts(
    files: CollectionFiles, store: str, name: str, version: str = "v000001", *, policy_version: int = 0
) -> Reference:
    """Import a collection as `<store>/datasets/<name>/<version>`; importing the same files again is a no-op.

    Args:
        policy_version: of the weights that made foreign rollouts; Roundhouse's own rows say it.

    Raises:
        DataError: a file cannot be read, or holds a (task, rollout) twice.
        StoreError: the version exists and was made of other files.
    """
    stage = Stage(Location(store) / f"datasets/{name}/{version}", kind=StageKind.COLLECT, run_id=name, iteration=0)
    hashed = hashlib.sha256()
    for path in (files.rollouts, files.failures, files.materialized_inputs):
        if path.exists():
            with path.open("rb") as file:
                hashed.update(hashlib.file_digest(file, "sha256").digest())
    digest = hashed.hexdigest()
    if (done := stage.reference()) is not None:
        manifest = read_manifest(done)
        if manifest.provenance.config_digest != digest:
            raise StoreError(
                f"{done.uri} exists and was imported from other files ({manifest.details.get('imported')}). "
                "Give the import another --name or --version."
            )
        return done
    found = read_collection(files, policy_version=policy_version)
    versions = {turn.policy_version for rollout in found.rollouts for turn in rollout.turns}
    provenance = Provenance(
        policy_version=max(versions, default=policy_version), config_digest=digest, code_version=code_version(), seed=0
    )
    attempt = stage.begin(provenance)
    for start in range(0, max(1, len(found.rollouts)), PART_ROLLOUTS):
        part = found.rollouts[start : start + PART_ROLLOUTS]
        attempt.write_table("turns", turns_table(part))
        attempt.write_table("rollouts", rollouts_table(part))
    if found.originals:
        attempt.write_table(DATASET, originals_table(found.originals))
    ledger = Ledger.from_rollouts(found.rollouts, requested=len(found.rollouts))
    details: dict[str, Any] = {"failures": ledger.failures, "imported": str(files.rollouts)}
    return attempt.commit(counts=ledger.counts(), details=details)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    files: CollectionFiles
    rollouts: int
    failures: int


def export_rollouts(
    reference: Reference, directory: Path, *, stem: str = "rollouts", agent: str | None = None
) -> Exported:
    """Write a complete collect or evaluate stage to `<directory>/<stem>*.jsonl` and its aggregate metrics.

    Args:
        agent: instance name for `agent_ref` where a task has none; by default the rollout's environment.
    """
    rollouts = rollouts_from_tables(read_table(reference, "rollouts"), read_table(reference, "turns"))
    originals: list[Original] = []
    if any(entry.path.startswith(f"{DATASET}-") for entry in read_manifest(reference).files):
        originals = originals_from_table(read_table(reference, DATASET))
    return write_collection(rollouts, originals, CollectionFiles(directory / f"{stem}.jsonl"), agent)


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
    """The rows as they pass, what statistics need of them put aside."""
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
