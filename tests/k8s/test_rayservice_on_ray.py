"""A RayService's application on a real Ray Serve: KubeRay is played by the test, Serve and the replicas are real.

The engine has no disk in common with the flow: it fetches config and tokenizer from a bucket, and weights from there or from
the flow's process.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import s3fs

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import DeploymentFailed
from roundhouse.infra.kubernetes.rayservice import RayServiceServed, ServedRun
from roundhouse.store.directories import upload_model
from roundhouse.store.location import Location
from roundhouse.store.stage import Provenance, Stage
from roundhouse.weight_sync.replica_state import RefitOptions, require_agreement
from roundhouse.weight_sync.tensor_files import digest_of
from roundhouse.weight_sync.transfer import Sender
from tests.generation import tiny
from tests.generation.cluster import ray_head
from tests.k8s.kuberay import Operator, RealServe, install_crd
from tests.k8s.stand import Stand
from tests.k8s.test_rayservice import manifest

CONFIG = GenerationConfig(
    backend="transformers", max_model_len=256, start_timeout_seconds=150, refit_timeout_seconds=60
)


def committed(location: Location, directory: Path, version: int) -> str:
    """A checkpoint as the checkpoint stage leaves it."""
    provenance = Provenance(policy_version=version, config_digest="", code_version="test", seed=0)
    attempt = Stage(location, kind="checkpoint", run_id="a", iteration=version).begin(provenance)
    written = upload_model(location, attempt.name, directory)
    for entry in written.files:
        attempt.adopt(entry)
    return attempt.commit(directory=written.directory).uri


@dataclass
class Service:
    """A RayService before its Ray cluster."""

    engine: RayServiceServed
    bucket: str
    uris: list[str]
    """Of two checkpoints in the bucket."""
    directories: list[Path]
    """With the same weights."""


@pytest.fixture
def service(stand: Stand, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    bucket, name = f"rh-{uuid.uuid4().hex[:12]}", "engine"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=bucket)
    run = Location(f"s3://{bucket}/runs/a")
    directories = [tiny.make_model(tmp_path / str(version), seed=version) for version in (0, 1)]
    uris = [
        committed(run / f"checkpoints/{version:06d}", directory, version)
        for version, directory in enumerate(directories)
    ]
    if stand.plane is not None:
        install_crd(stand.admin)
    stand.admin.create(f"/apis/ray.io/v1/namespaces/{stand.namespace}/rayservices", manifest(name, stand.namespace))
    with ray_head() as ray:
        operator = Operator(stand.admin, stand.namespace, RealServe(ray))
        infra = KubernetesInfra.model_validate(
            {"namespace": stand.namespace, "engine": {"ray_service": name, "url": ray.http_url}}
        )
        assert infra.engine is not None
        try:
            yield Service(
                RayServiceServed(infra, infra.engine, ServedRun("a", "uid-of-a", run.uri)), bucket, uris, directories
            )
        finally:
            operator.stop()


@pytest.mark.long
def test_the_flow_starts_the_application_of_a_rayservice_and_refits_its_replica_in_place(service: Service) -> None:
    engine, uris = service.engine, service.uris
    [first] = engine.ensure(CONFIG, uris[0], uris[0], 0)
    [second] = engine.ensure(CONFIG, uris[0], uris[1], 1)
    assert (first.policy_version, second.policy_version, second.weights) == (0, 1, uris[1])
    assert (first.pid, first.replica_id) == (second.pid, second.replica_id), "in place"
    with pytest.raises(DeploymentFailed, match="no safetensors files"):
        engine.ensure(CONFIG, uris[0], f"s3://{service.bucket}/nothing", 2)
    assert engine.ensure(CONFIG, uris[0], uris[1], 1)[0].pid == first.pid


@pytest.mark.long
def test_weights_come_from_the_flows_process_and_from_the_bucket_where_it_cannot_be_reached(service: Service) -> None:
    """What an engine hears of the sender it hears through `serveConfigV2`, as KubeRay hands it on."""
    config = CONFIG.model_copy(update={"backend": "vllm", "weight_sync": "transfer", "kv_cache_gib": 0.1})
    engine, uris, second = service.engine, service.uris, service.directories[1]
    [first] = engine.ensure(config, uris[0], uris[0], 0)
    with Sender(second, "gloo", [first.replica_id], "127.0.0.1", seconds=30) as sending:
        source = sending.source("float32")
        [sent] = engine.ensure(config, uris[0], uris[1], 1, RefitOptions(digest_of(second), source.model_dump()))
    assert (sent.transport, sent.transport_note, sent.pid) == ("transfer", None, first.pid)
    assert sending.sent == 1
    require_agreement([sent], "float32")
    with socket.socket() as taken:  # nobody listens there: of a sender that has gone, or that a NetworkPolicy hides
        taken.bind(("127.0.0.1", 0))
        hidden = source.model_copy(update={"port": taken.getsockname()[1]})
        options = RefitOptions(digest_of(service.directories[0]), hidden.model_dump())
        [read] = engine.ensure(config, uris[0], uris[0], 2, options)
    assert (read.transport, read.pid) == ("store", first.pid)
    assert "k8s/components/weight-transfer" in str(read.transport_note)
    assert read.probe != sent.probe
