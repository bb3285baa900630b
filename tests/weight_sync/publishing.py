"""Publish weights of a run, and take them as a replica does; fixtures of the tests of weight transports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roundhouse.config.loading import parse_config
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse.weight_sync.base import FetchedWeights, Published, RunCheckpoint, fetch_weights, load_transport
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.replica_state import ReplicaReport
from roundhouse.weight_sync.tensor_files import retype, weight_files
from tests.stages.test_checkpoint import trained
from tests.training.tiny import make_model


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    """The replica's node."""
    return NodeCache(tmp_path / "node", 10**9)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "store")
    import s3fs

    url = request.getfixturevalue("s3_server")
    name = f"travel-{abs(hash(str(tmp_path)))}"
    s3fs.S3FileSystem(client_kwargs={"endpoint_url": url}).call_s3("create_bucket", Bucket=name)
    return f"s3://{name}/store"


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    """Two successive checkpoints in float32."""
    old = make_model(tmp_path / "old")
    new = tmp_path / "new"
    new.mkdir()
    for path in weight_files(old):
        save_file({name: tensor * 1.001 for name, tensor in load_file(path).items()}, new / path.name)
    return old, new


def in_bfloat16(source: Path, target: Path) -> Path:
    target.mkdir()
    retype(source, target, "bfloat16")
    return target


def begun(tmp_path: Path, store: str, **generation: Any) -> tuple[Run, list[Reference]]:
    """A run with versions 0, 1 and 2, that differ a little."""
    config = {"run_id": "r", "store": store, "generation": {"dtype": "bfloat16", **generation}}
    run = open_run(parse_config({**config, "infra": {"state": str(tmp_path / "state")}}))
    found = [publish_starting_policy(run, make_model(tmp_path / "v0"), {})]
    for version in (1, 2):
        directory = tmp_path / f"v{version}"
        shutil.copytree(tmp_path / "v0", directory)
        tensors = load_file(directory / "model.safetensors")
        save_file(
            {name: tensor * (1 + 1e-3 * version) for name, tensor in tensors.items()}, directory / "model.safetensors"
        )
        found.append(publish(run, trained(run, version, directory)))
    return run, found


@contextmanager
def published(run: Run, checkpoint: Reference, replicas: Sequence[ReplicaReport] = ()) -> Iterator[Published]:
    cache = NodeCache(Path(run.config.infra.state) / "cache/weights", 10**9)
    with load_transport(run.config.generation.weight_sync).publish(
        RunCheckpoint(run, checkpoint, cache), replicas
    ) as found:
        yield found


def follow(
    found: Published, checkpoint: Reference, cache: NodeCache, held: FetchedWeights | None = None
) -> FetchedWeights:
    return fetch_weights(checkpoint.uri, found.source, found.digest, cache, held)
