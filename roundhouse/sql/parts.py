"""Select the valid part files of a store.

Invariant: the manifest names every part of a complete stage, so remains of an interrupted or losing attempt are
never read. If unfinished stages are requested too, each gives the parts of its newest attempt that has any, or of the
newest writer of each shard, marked as incomplete: a writer writes taken-over rollouts again, so none comes twice. With
several rounds of shards, the newest round counts.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from roundhouse.errors import StoreError
from roundhouse.store import bucket
from roundhouse.store.location import Location, NotFound
from roundhouse.store.stage import MANIFEST, Manifest

READERS = 16
"""Manifests read at once: each is one small request to a bucket."""

_STAGE_FILE = re.compile(r"(?P<run>[^/]+)/iterations/(?P<iteration>\d+)/(?P<stage>[^/]+)/(?P<file>[^/]+)")
_CHECKPOINT = re.compile(r"(?P<run>[^/]+)/checkpoints/(?P<version>\d+)/" + re.escape(MANIFEST))
_DATASET_FILE = re.compile(r"(?P<dataset>[^/]+)/(?P<version>[^/]+)/(?P<file>[^/]+)")
_PART = re.compile(
    r"(?P<dataset>[a-z_]+)-a(?P<attempt>\d+)(?:-(?P<shard>s\d+of(?P<count>\d+))-(?P<writer>\d+))?-\d+\.parquet"
)


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file of a stage's dataset."""

    uri: str
    dataset: str
    complete: bool
    """Whether a manifest names it."""
    size: int | None = None
    """Bytes, if the manifest has them, which saves a request to a bucket."""


@dataclass(frozen=True, slots=True)
class StageFiles:
    """One stage directory of one run, with its known facts."""

    run_id: str
    iteration: int
    stage: str
    """The stage's kind, or `checkpoint` (then the iteration is the policy version)."""
    uri: str
    names: tuple[str, ...]
    """Files that lie in it."""
    manifest: Manifest | None = None
    dataset: str = ""
    """Name of the dataset that this stage is a version of; empty for a run's stages."""
    version: str = ""

    @property
    def complete(self) -> bool:
        return self.manifest is not None

    def parts(self, dataset: str) -> list[Part]:
        """Return the dataset's parts in the order of writing; empty if the dataset does not exist."""
        if self.manifest is not None:
            entries = self.manifest.files
            named = {
                e.path: e.size for e in entries if e.path.startswith(f"{dataset}-") and e.path.endswith(".parquet")
            }
            return [Part(f"{self.uri}/{name}", dataset, True, size) for name, size in named.items()]
        return [Part(f"{self.uri}/{name}", dataset, False) for name in _newest(self.names, dataset)]


def _newest(names: Iterable[str], dataset: str) -> list[str]:
    """Return the newest attempt's parts, or those of the newest writer of each shard if that attempt has shards
    (`Stage.join`). Another attempt with as many shards has the same ones."""
    matches = [match for name in names if (match := _PART.fullmatch(name)) is not None and match["dataset"] == dataset]
    if not matches:
        return []

    def writer(match: re.Match[str]) -> tuple[int, int]:
        return int(match["attempt"]), int(match["writer"] or 0)

    count = max(matches, key=writer)["count"]
    alike = [match for match in matches if match["count"] == count]
    newest = {match["shard"]: writer(match) for match in sorted(alike, key=writer)}
    return sorted(match.string for match in alike if writer(match) == newest[match["shard"]])


def runs_stages(
    store: str,
    *,
    runs: Sequence[str] | None = None,
    wanted: Callable[[StageFiles], bool] = lambda stage: True,
    unfinished: bool = False,
) -> list[StageFiles]:
    """The stages and checkpoints of a store's runs (or of `runs`), in order, each with its manifest.

    Args:
        wanted: only these are opened; it sees them without manifest.
        unfinished: stages without a manifest too, when they have parts.

    Raises:
        StoreError: a manifest cannot be read.
    """
    root = Location(store) / "runs"
    names = root.tree() if runs is None else [f"{run}/{name}" for run in runs for name in (root / run).tree()]
    stages = [stage for stage in stages_in(root.uri, names) if wanted(stage)]
    opened = open_stages([stage for stage in stages if MANIFEST in stage.names])
    rest = [stage for stage in stages if MANIFEST not in stage.names] if unfinished else []
    return sorted([*opened, *rest], key=lambda stage: (stage.run_id, stage.iteration, stage.stage))


def stages_in(root: str, names: Iterable[str]) -> Iterator[StageFiles]:
    """The stages and checkpoints among files listed below `<store>/runs`; pure."""
    files: dict[tuple[str, int, str, str], list[str]] = {}
    for name in names:
        if (match := _STAGE_FILE.fullmatch(name)) is not None:
            place = f"{root}/{name.rsplit('/', 1)[0]}"
            files.setdefault((match["run"], int(match["iteration"]), match["stage"], place), []).append(match["file"])
        elif (match := _CHECKPOINT.fullmatch(name)) is not None:
            place = f"{root}/{name.rsplit('/', 1)[0]}"
            files[(match["run"], int(match["version"]), "checkpoint", place)] = [MANIFEST]
    for (run_id, iteration, stage, place), own in files.items():
        yield StageFiles(run_id, iteration, stage, place, tuple(sorted(own)))


def datasets_stages(store: str, *, runs: Sequence[str] | None = None, unfinished: bool = False) -> list[StageFiles]:
    """Return the versions of a store's datasets, in order, each with its manifest.

    Args:
        runs: only collections of these runs.
        unfinished: also versions without a manifest; their collecting run is unknown.

    Raises:
        StoreError: a manifest cannot be read.
    """
    root = Location(store) / "datasets"
    files: dict[tuple[str, str], list[str]] = {}
    for name in root.tree():
        if (match := _DATASET_FILE.fullmatch(name)) is not None:
            files.setdefault((match["dataset"], match["version"]), []).append(match["file"])
    stages = [
        StageFiles("", 0, "collect", f"{root.uri}/{dataset}/{version}", tuple(sorted(own)), None, dataset, version)
        for (dataset, version), own in files.items()
    ]
    opened = [
        replace(stage, run_id=stage.manifest.run_id, iteration=stage.manifest.iteration)
        for stage in open_stages([stage for stage in stages if MANIFEST in stage.names])
        if stage.manifest is not None and (runs is None or stage.manifest.run_id in runs)
    ]
    rest = [stage for stage in stages if MANIFEST not in stage.names] if unfinished and runs is None else []
    return sorted([*opened, *rest], key=lambda stage: (stage.dataset, stage.version))


def open_stages(stages: Sequence[StageFiles]) -> list[StageFiles]:
    """Return them with their manifests; omit a stage if its manifest vanished in the meantime (retention deletes
    checkpoints)."""
    with ThreadPoolExecutor(READERS) as pool:
        manifests = list(pool.map(lambda stage: read_manifest_at(stage.uri), stages))
    return [
        replace(stage, manifest=manifest)
        for stage, manifest in zip(stages, manifests, strict=True)
        if manifest is not None
    ]


def read_manifest_at(uri: str) -> Manifest | None:
    """The manifest in a directory; None when the stage is not complete.

    Raises:
        StoreError: it is there and cannot be read.
    """
    try:
        data = Location(uri).read(MANIFEST)
    except NotFound:
        return None
    try:
        return Manifest.model_validate_json(data)
    except ValueError as error:
        raise StoreError(f"{uri}/{MANIFEST} cannot be read: {error}. Run `roundhouse store verify`.") from error


PLACE = pa.schema(
    [("run_id", pa.string()), ("iteration", pa.int32()), ("stage", pa.string()), ("complete", pa.bool_())]
)
"""The columns that locate a row in the store."""
DATASET_PLACE = pa.schema(
    [("dataset", pa.string()), ("version", pa.string()), ("run_id", pa.string()), ("complete", pa.bool_())]
)
"""Columns of a dataset's row; `run_id` is the run that collected it."""

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
            file_schema = _FORMAT.inspect(path, filesystem)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"{uri} cannot be read: {error}. Run `roundhouse store verify`.") from error
        schema = pa.schema([*schema, *(field for field in file_schema if field.name not in schema.names)])
    return schema


def located(uri: str) -> tuple[fs.FileSystem, str]:
    """Arrow's own file system of a URI, and the path in it."""
    scheme, path = uri.split("://", 1)
    return (fs.LocalFileSystem(), path) if scheme == "file" else (_bucket(bucket.endpoint()), path)


@functools.cache
def _bucket(endpoint: str | None) -> fs.FileSystem:
    """S3, with credentials and region of the environment as everywhere (`roundhouse.store.location`)."""
    return fs.S3FileSystem(endpoint_override=endpoint, connect_timeout=10, request_timeout=60)
