"""Checkpoints through a claim that the training pods of a node have in common, on a real node with a bucket.

The bucket is served by this machine: `ROUNDHOUSE_HOST` is its address as pods reach it, where that is not the one by which it
reaches the API server. The rest: `tests/plugins/kubernetes/nodes.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from roundhouse.config.loading import parse_config
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest
from tests.plugins.kubernetes.nodes import Nodes, fresh_namespace, images
from tests.stages.test_train import make_run, sequences
from tests.waiting import until

Object = dict[str, Any]

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

CLAIM = "roundhouse-cache"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    trainer = images("trainer")["trainer"]
    with fresh_namespace(trainer) as ready:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "roundhouse-trainer"}}
        ready.cluster.create(ready.path("serviceaccounts"), account)
        wanted = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": wanted}
        ready.cluster.create(ready.path("persistentvolumeclaims"), claim)
        yield ready


def own_address(nodes: Nodes) -> str:
    if named := os.environ.get("ROUNDHOUSE_HOST"):
        return named
    server = urllib.parse.urlsplit(nodes.cluster.host)
    with socket.create_connection((server.hostname, server.port or 443), timeout=20) as connection:
        address = str(connection.getsockname()[0])
    if address.startswith("127."):
        pytest.skip("ROUNDHOUSE_HOST names no address of this machine that pods reach: no bucket for them")
    return address


@pytest.fixture
def bucket(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket that pods reach, and the variables by which they do."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    address = own_address(nodes)
    variables = {
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(address, port), "the bucket's server")
        name = f"rh-{uuid.uuid4().hex[:12]}"
        s3fs.S3FileSystem().call_s3("create_bucket", Bucket=name)
        yield f"s3://{name}/store", variables
    finally:
        server.terminate()
        server.wait(30)


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_the_second_step_of_a_node_does_not_fetch_its_checkpoint(
    nodes: Nodes, bucket: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    store, variables = bucket
    tree = make_run(store, tmp_path, kind="process").config.model_dump(mode="json")
    tree["infra"] = {
        "kind": "kubernetes",
        "namespace": nodes.namespace,
        "state": str(tmp_path / "flow"),
        "environment": variables | {"OMP_NUM_THREADS": "1"},
        "trainer": {"image": nodes.image, "memory": "2Gi", "cpu": "100m", "scratch": "2Gi", "shared_memory": "64Mi"}
        | {"cache_claim": CLAIM, "cache_gib": 0.5},
    }
    run = open_run(parse_config(tree))
    base, fetched = starting_policy(run), []
    for iteration in (1, 2):
        update = train_iteration(run, iteration, sequences(run, iteration), base, tmp_path / "cache", print)
        metrics = read_manifest(update).metrics
        print({name: value for name, value in metrics.items() if "kubernetes" in name or "fetched" in name})
        fetched.append(metrics["train/fetched_bytes"])
        base = publish(run, update)
    first = run.checkpoint(0).reference()
    assert first is not None
    assert fetched == [sum(file.size for file in read_manifest(first).files), 0]
