"""What an imported dataset keeps of the files it came from, beside its rollouts and turns.

Invariant: with it, an export gives back the imported files, line for line. A dataset that Roundhouse collected has none, nor
has one whose import could prove that the export's own rule gives the same lines.

One row a line of a file: the file, the line's number, the rollout that it made (none for an attempt that a later one
replaced), and what the record has no place for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import orjson
import pyarrow as pa

from roundhouse.compat.nemo_gym.exchange.incoming import Remnant
from roundhouse.compat.nemo_gym.exchange.json_lines import Row, line_of

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
        ("row", pa.string()),  # JSON: the whole row, where no record stands for it
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
            "remnant": None if one.remnant is None else _text(_fields(one.remnant)),
            "row": None if one.row is None else _text(one.row),
        }
        for one in originals
    ]
    return pa.Table.from_pylist(rows, schema=ORIGINALS)


def originals_from_table(table: pa.Table) -> list[Original]:
    """The lines behind the dataset, as they were written."""
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


def _fields(remnant: Remnant) -> dict[str, Any]:
    return {field.name: getattr(remnant, field.name) for field in fields(remnant)}


def _text(value: dict[str, Any]) -> str:
    return line_of(value).decode().rstrip("\n")
