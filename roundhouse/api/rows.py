"""Rows of a run's Parquet files as a pyarrow dataset, read when they are asked for."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds

from roundhouse.errors import ConfigError
from roundhouse.notebook import html_table, shortened

if TYPE_CHECKING:
    import pandas as pd

PREVIEW_ROWS = 5
PREVIEW_COLUMNS = (
    "iteration", "stage", "rollout_id", "task_id", "sequence_id", "status", "reward", "reason", "turn", "final_text", "text",
)  # fmt: skip


class Rows:
    """Rows of one kind: rollouts, turns, sequences or quarantined rollouts.

    Nothing is read before `to_pandas`, `to_table`, `head`, `count` or iteration; filters and columns are pushed down to the
    Parquet files.
    """

    def __init__(self, kind: str, dataset: ds.Dataset) -> None:
        self.kind = kind
        self.dataset = dataset
        """The pyarrow dataset, for its other methods."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self.dataset.schema.names)

    def filter(self, expression: ds.Expression | None = None, **values: Any) -> Rows:
        """Return the rows for which an expression holds and columns have the given values.

        Args:
            expression: such as `pyarrow.dataset.field("reward") > 0.5`.
            values: a value, or a list of possible values, by column.

        Raises:
            ConfigError: a column is unknown.
        """
        self._refuse_unknown(values)
        parts = [] if expression is None else [expression]
        for column, value in values.items():
            field = ds.field(column)
            parts.append(field.isin(list(value)) if isinstance(value, list | tuple | set | range) else field == value)
        if not parts:
            return self
        return Rows(self.kind, self.dataset.filter(functools.reduce(operator.and_, parts)))

    def to_table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows into an Arrow table.

        Args:
            columns: the only ones to read.

        Raises:
            ConfigError: a column is unknown.
        """
        self._refuse_unknown(columns or ())
        return self.dataset.to_table(columns=None if columns is None else list(columns))

    def to_pandas(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read the rows into a data frame; arguments and errors as of `to_table`. Maps become dictionaries."""
        return self.to_table(columns).to_pandas(maps_as_pydicts="lossy")

    def head(self, count: int = PREVIEW_ROWS) -> pd.DataFrame:
        """Read the first rows into a data frame."""
        return self.dataset.head(count).to_pandas(maps_as_pydicts="lossy")

    def count(self) -> int:
        """Count the rows, from the files' metadata where no filter needs more."""
        return int(self.dataset.count_rows())

    def __len__(self) -> int:
        return self.count()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read the rows one batch at a time."""
        for batch in self.dataset.to_batches():
            yield from batch.to_pylist(maps_as_pydicts="lossy")

    def __repr__(self) -> str:
        return f"<Rows {self.kind}: {self.count()} rows, {len(self.columns)} columns>"

    def _repr_html_(self) -> str:
        preview = [column for column in PREVIEW_COLUMNS if column in self.columns]
        table = self.dataset.head(PREVIEW_ROWS, columns=preview)
        rows = ([_preview(row[column]) for column in preview] for row in table.to_pylist())
        rest = f"{self.count()} {self.kind}, {len(self.columns)} columns; to_pandas() reads all"
        return html_table(preview, rows, rest)

    def _refuse_unknown(self, columns: Sequence[str] | dict[str, Any]) -> None:
        if unknown := [column for column in columns if column not in self.columns]:
            raise ConfigError(f"{self.kind} have no column {unknown[0]!r}. Columns: {', '.join(self.columns)}.")


def _preview(value: object) -> object:
    return shortened(value) if isinstance(value, str) else value
