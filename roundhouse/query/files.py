"""Part files as one Arrow dataset: columns and row groups are read only where somebody looks.

Invariant: where a file lies is data too. Every row carries its run, iteration, stage and whether the stage is complete, and a
condition on these skips whole files without opening them.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from roundhouse.errors import StoreError
from roundhouse.query.parts import StageFiles

PLACE = pa.schema(
    [("run_id", pa.string()), ("iteration", pa.int32()), ("stage", pa.string()), ("complete", pa.bool_())]
)
"""The columns that say where a row lies."""
DATASET_PLACE = pa.schema(
    [("dataset", pa.string()), ("version", pa.string()), ("run_id", pa.string()), ("complete", pa.bool_())]
)
"""Those of a row of a dataset; `run_id` is the run that collected it."""

_FORMAT = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(pre_buffer=True, use_buffered_stream=False)
)


def dataset_of(stages: Iterable[StageFiles], dataset: str, schema: pa.Schema, columns: pa.Schema = PLACE) -> ds.Dataset:
    """The rows of a dataset in these stages; columns that an older file lacks are null.

    Args:
        columns: attributes of a stage that every row of it carries.
    """
    fragments = []
    filesystem: fs.FileSystem = fs.LocalFileSystem()
    for stage in stages:
        place = functools.reduce(
            operator.and_,
            (ds.field(name) == pa.scalar(getattr(stage, name), columns.field(name).type) for name in columns.names),
        )
        for part in stage.parts(dataset):
            filesystem, path = located(part.uri)
            fragments.append(_FORMAT.make_fragment(path, filesystem, partition_expression=place, file_size=part.size))
    return ds.FileSystemDataset(fragments, with_place(schema, columns), _FORMAT, filesystem)


def with_place(schema: pa.Schema, columns: pa.Schema = PLACE) -> pa.Schema:
    return pa.schema([*columns, *(field for field in schema if field.name not in columns.names)])


def columns_found(stages: Sequence[StageFiles], dataset: str, known: pa.Schema) -> pa.Schema:
    """`known` with the further columns of the dataset, as the newest file of each run has them.

    Raises:
        StoreError: a file cannot be read.
    """
    newest = {stage.run_id: part.uri for stage in stages for part in stage.parts(dataset)}
    schema = known
    for uri in newest.values():
        filesystem, path = located(uri)
        try:
            found = _FORMAT.inspect(path, filesystem)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"{uri} cannot be read: {error}. Run `roundhouse store verify`.") from error
        schema = pa.schema([*schema, *(field for field in found if field.name not in schema.names)])
    return schema


def located(uri: str) -> tuple[fs.FileSystem, str]:
    """Arrow's own file system of a URI, and the path in it."""
    scheme, path = uri.split("://", 1)
    return (fs.LocalFileSystem(), path) if scheme == "file" else (_bucket(os.environ.get("AWS_ENDPOINT_URL")), path)


@functools.cache
def _bucket(endpoint: str | None) -> fs.FileSystem:
    """S3, with credentials and region of the environment as everywhere (`roundhouse.store.location`)."""
    return fs.S3FileSystem(endpoint_override=endpoint, connect_timeout=10, request_timeout=60)
