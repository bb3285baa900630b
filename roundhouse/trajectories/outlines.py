"""Rollouts without their words and token IDs: outcome, reward, lengths and times, which is what counts and metrics are made of.

Invariant: an outline has the turns of its rollout and as many generated tokens in each; every token ID is 0, and there are no
words. So whoever only counts 100,000 rollouts does not hold them.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from roundhouse.trajectories.records import Rollout
from roundhouse.trajectories.schemas import rollouts_from_tables


def outlines_from_tables(rollouts: pa.Table, turns: pa.Table) -> list[Rollout]:
    """Outlines of the rollouts of two datasets, in the order of `rollouts`."""
    lengths = pc.fill_null(pc.list_value_length(turns["generation_token_ids"]), 0)
    blank = {name: _lists(turns, name, pa.repeat(0, turns.num_rows)) for name in _TOKENS}
    blank["generation_token_ids"] = _lists(turns, "generation_token_ids", lengths)
    texts = {"task": pa.repeat("{}", rollouts.num_rows), "messages": pa.repeat("[]", rollouts.num_rows)}
    return rollouts_from_tables(_replaced(rollouts, texts), _replaced(turns, blank))


_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def _lists(table: pa.Table, name: str, lengths: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Lists of zeros of these lengths, of the column's type."""
    kind = table.schema.field(name).type
    ends = pc.cumulative_sum(lengths.cast(pa.int32()))
    ends = ends.combine_chunks() if isinstance(ends, pa.ChunkedArray) else ends
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, pa.repeat(pa.scalar(0, kind.value_type), offsets[-1].as_py()), type=kind)


def _replaced(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    for name, column in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(place), column)
    return table
