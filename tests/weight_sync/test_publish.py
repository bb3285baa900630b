"""A run's weights are published by the transport of its configuration, and a replica that takes them holds the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DeploymentFailed
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.store.run import Run, open_run
from roundhouse.store.stage import Reference
from roundhouse.weight_sync.base import FetchedWeights, Published, RunCheckpoint, fetch_weights, load_transport
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.replica_state import ReplicaReport, require_agreement
from roundhouse.weight_sync.shared_memory import SharedMemorySource, release_memory
from tests.stages.test_checkpoint import trained
from tests.training.tiny import make_model


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    """The replica's node."""
    return NodeCache(tmp_path / "node", 10**9)


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


def says(weights: FetchedWeights, checkpoint: Reference) -> ReplicaReport:
    """Return the answer of a replica with these weights."""
    status = {
        "replica_id": "a",
        "ready": True,
        "digest": weights.digest,
        "weights": checkpoint.uri,
        "probe": [-1.0, -2.0],
    }
    return ReplicaReport.parse(status)


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "store")
    import s3fs

    url = request.getfixturevalue("s3_server")
    name = f"travel-{abs(hash(str(tmp_path)))}"
    s3fs.S3FileSystem(client_kwargs={"endpoint_url": url}).call_s3("create_bucket", Bucket=name)
    return f"s3://{name}/store"


def test_by_store_the_digest_is_the_checkpoints(tmp_path: Path, store: str, cache: NodeCache) -> None:
    run, checkpoints = begun(tmp_path, store)
    with published(run, checkpoints[1]) as found:
        weights = follow(found, checkpoints[1], cache)
    assert found.source is None
    assert weights.digest == found.digest


def test_by_delta_the_first_comes_whole_and_the_next_as_what_changed(
    tmp_path: Path, store: str, cache: NodeCache
) -> None:
    run, checkpoints = begun(tmp_path, store, weight_sync="delta")
    with published(run, checkpoints[0]) as found:
        held = follow(found, checkpoints[0], cache)
    assert (held.transport, held.note) == ("store", None)
    for checkpoint, before in ((checkpoints[1], checkpoints[0]), (checkpoints[2], checkpoints[1])):
        with published(run, checkpoint, [says(held, before)]) as found:
            held = follow(found, checkpoint, cache, held)
            late = follow(found, checkpoint, NodeCache(tmp_path / f"late-{checkpoint.policy_version}", 10**9))
        assert (held.transport, held.note, held.digest) == ("delta", None, found.digest)
        assert (late.transport, late.digest) == ("store", found.digest), (
            "a late joiner comes to the newest version by itself"
        )
    assert len((run.location / "deltas").names()) == 2


def test_a_delta_for_an_older_version_is_there_until_it_was_read(tmp_path: Path, cache: NodeCache) -> None:
    run, checkpoints = begun(tmp_path, str(tmp_path / "store"), weight_sync="delta")
    with published(run, checkpoints[0]) as found:
        held = follow(found, checkpoints[0], cache)
    deltas = run.location / "deltas"
    newer = [f"00001{number}-from-{'0' * 12}-{'0' * 12}" for number in range(3)]
    for name in newer:
        (deltas / name).write("delta.json", b"{}")
    with published(run, checkpoints[1], [says(held, checkpoints[0])]) as found:
        assert follow(found, checkpoints[1], cache, held).transport == "delta"
    assert deltas.names()[1:] == newer[1:]


def test_by_memory_one_version_is_there_and_none_is_left_behind(tmp_path: Path, store: str, cache: NodeCache) -> None:
    run, checkpoints = begun(tmp_path, store, weight_sync="shared-memory")
    places = []
    for checkpoint in checkpoints[:2]:
        with published(run, checkpoint) as found:
            assert isinstance(found.source, SharedMemorySource)
            places.append(Path(found.source.path))
            assert follow(found, checkpoint, cache).transport == "shared-memory"
    assert [place.is_dir() for place in places] == [False, True]
    release_memory()
    assert not places[1].exists()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"generation": {"weight_sync": "adapter"}}, "train.lora"),
        (
            {"generation": {"weight_sync": "nccl"}},
            r"weight-transfer engine of vLLM.*generation\.transfer_backend to nccl",
        ),
        ({"generation": {"weight_sync": "ipc"}}, "pickled"),
        ({"generation": {"weight_sync": "transfer", "transfer_backend": "ipc"}}, "pickled"),
        ({"generation": {"weight_sync": "transfer", "backend": "transformers"}}, "generation.backend is transformers"),
        ({"generation": {"weight_sync": "transfer", "transfer_backend": "nccl"}}, "gpus_per_replica is 0"),
        ({"generation": {"keep_prefix_cache": True}}, "keep_prefix_cache"),
        (
            {"generation": {"inflight_requests": "drain"}, "asynchrony": {"mode": "batch-async", "staleness": 1}},
            "generation.inflight_requests",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_configuration_is_read(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config({"run_id": "r", **overrides})


@pytest.fixture
def alike() -> list[ReplicaReport]:
    one = ReplicaReport.parse({"replica_id": "a", "ready": True, "digest": "sha256:1", "probe": [-1.0, -2.0]})
    return [one, replace(one, replica_id="b", probe=[-1.0, -2.0000001])]


def test_replicas_that_loaded_or_compute_something_else_are_named(alike: list[ReplicaReport]) -> None:
    require_agreement(alike, "float32")
    with pytest.raises(DeploymentFailed, match=r"b loaded tensors of digest sha256:2"):
        require_agreement([alike[0], replace(alike[1], digest="sha256:2")], "float32")
    stale_head = replace(alike[1], probe=[-1.0, -8.5])
    with pytest.raises(
        DeploymentFailed, match=r"b differs in the probe's log-probabilities by 6\.5 nats from replica a"
    ):
        require_agreement([alike[0], stale_head], "float32")
    with pytest.raises(DeploymentFailed, match="record of this version"):
        require_agreement(alike, "float32", {"digest": "sha256:1", "probe": [-1.0, -3.0]})
