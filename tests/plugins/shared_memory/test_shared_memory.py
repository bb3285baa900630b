"""Weights in the memory of the node that the flow and the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError
from roundhouse.plugins.shared_memory.transport import SharedMemorySource, release_memory
from roundhouse.weight_sync.base import fetch_weights
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.tensor_files import digest_of
from tests.weight_sync.publishing import begun, follow, in_bfloat16, published


def test_shared_memory_of_another_node_is_no_way(versions: tuple[Path, Path], cache: NodeCache, tmp_path: Path) -> None:
    here = in_bfloat16(versions[0], tmp_path / "memory")
    way = SharedMemorySource(dtype="bfloat16", path=str(here))
    assert fetch_weights(str(versions[0]), way, digest_of(here), cache).transport == "shared-memory"
    elsewhere = fetch_weights(
        str(versions[0]), SharedMemorySource(dtype="bfloat16", path="/dev/shm/no"), digest_of(here), cache
    )
    assert (elsewhere.transport, elsewhere.digest) == ("store", digest_of(here))
    assert "not in this node's memory" in str(elsewhere.note)


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


def test_a_run_on_a_cluster_is_refused() -> None:
    engine = {"ray_service": "engine", "url": "http://engine:8000"}
    tree = {"run_id": "r", "store": "s3://bucket/runs", "infra": {"kind": "kubernetes", "engine": engine}}
    with pytest.raises(ConfigError, match=r"infra\.kind kubernetes flow and engine are in separate pods"):
        parse_config(tree | {"generation": {"weight_sync": "shared-memory"}})
