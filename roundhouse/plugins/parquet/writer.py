"""Write rollouts and turns as one Parquet file each.

Invariant: each column has a type that `datasets.load_dataset` reads. The store's maps from name to number, for which it lacks a
type, become lists of `{name, value}`; all other columns stay as stored.

    reward_components   map {correct: 1.0}   ->   [{"name": "correct", "value": 1.0}]
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from roundhouse.store.stage import Reference, read_table
from roundhouse.trajectories.foreign_files import Written


def write(reference: Reference, directory: Path, agent: str | None) -> Written:
    """Write `<directory>/rollouts.parquet` and `turns.parquet` (`writer.parquet`)."""
    directory.mkdir(parents=True, exist_ok=True)
    rollouts = read_table(reference, "rollouts")
    for name, table in (("rollouts", rollouts), ("turns", read_table(reference, "turns"))):
        pq.write_table(_without_maps(table), directory / f"{name}.parquet", compression="zstd")
    failures = rollouts["reward"].null_count
    return Written(directory, rollouts.num_rows - failures, failures)


def _without_maps(table: pa.Table) -> pa.Table:
    for place, field in enumerate(table.schema):
        if pa.types.is_map(field.type):
            lists = [_lists_of(chunk) for chunk in table.column(place).chunks]
            kind = pa.list_(pa.struct([("name", field.type.key_type), ("value", field.type.item_type)]))
            table = table.set_column(place, field.name, pa.chunked_array(lists, kind))
    return table


def _lists_of(maps: pa.MapArray) -> pa.ListArray:
    pairs = pa.StructArray.from_arrays([maps.keys, maps.items], ["name", "value"])
    return pa.ListArray.from_arrays(maps.offsets, pairs)
