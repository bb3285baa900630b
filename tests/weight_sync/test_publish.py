"""A run's weights are published by the transport of its configuration, and a replica that takes them holds the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, DeploymentFailed
from roundhouse.weight_sync.cache import NodeCache
from roundhouse.weight_sync.replica_state import ReplicaReport, require_agreement
from tests.weight_sync.publishing import begun, follow, published


def test_by_store_the_digest_is_the_checkpoints(tmp_path: Path, store: str, cache: NodeCache) -> None:
    run, checkpoints = begun(tmp_path, store)
    with published(run, checkpoints[1]) as found:
        weights = follow(found, checkpoints[1], cache)
    assert found.source is None
    assert weights.digest == found.digest


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            {"generation": {"weight_sync": "nccl"}},
            r"weight-transfer engine of vLLM.*generation\.transfer_backend to nccl",
        ),
        ({"generation": {"weight_sync": "ipc"}}, "pickled"),
        ({"generation": {"transfer_backend": "ipc"}}, "pickled"),
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
