"""A RayService's application on a real Ray Serve: KubeRay is played by the test, Serve and the replicas are real.

The engine has no disk in common with the flow: it fetches config and tokenizer from a bucket, and weights from there or from
the flow's process.
"""

from __future__ import annotations

import socket
import uuid
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
    weight_sync="transfer", max_model_len=256, kv_cache_gib=0.1, start_timeout_seconds=150, refit_timeout_seconds=60
)


def committed(location: Location, directory: Path, version: int) -> str:
    """A checkpoint as the checkpoint stage leaves it."""
    provenance = Provenance(policy_version=version, config_digest="", code_version="test", seed=0)
    attempt = Stage(location, kind="checkpoint", run_id="a", iteration=version).begin(provenance)
    written = upload_model(location, attempt.name, directory)
    for entry in written.files:
        attempt.adopt(entry)
    return attempt.commit(directory=written.directory).uri


@pytest.mark.long
def test_the_flow_starts_the_application_of_a_rayservice_and_refits_its_replica_in_place(
    stand: Stand, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    path = f"/apis/ray.io/v1/namespaces/{stand.namespace}/rayservices"
    stand.admin.create(path, manifest(name, stand.namespace))
    with ray_head() as ray:
        operator = Operator(stand.admin, stand.namespace, RealServe(ray))
        infra = KubernetesInfra.model_validate(
            {"namespace": stand.namespace, "engine": {"ray_service": name, "url": ray.http_url}}
        )
        assert infra.engine is not None
        engine = RayServiceServed(infra, infra.engine, ServedRun("a", "uid-of-a", run.uri))
        try:
            _refit_in_place(engine, uris, directories, nothing=f"s3://{bucket}/nothing")
        finally:
            operator.stop()


def _refit_in_place(engine: RayServiceServed, uris: list[str], directories: list[Path], nothing: str) -> None:
    """By the bucket and from this process. What an engine hears of either it hears through `serveConfigV2`."""
    [first] = engine.ensure(CONFIG, uris[0], uris[0], 0)
    assert (first.policy_version, first.weights, first.transport) == (0, uris[0], "store")
    digests = [digest_of(directory) for directory in directories]
    with Sender(directories[1], "gloo", [first.replica_id], "127.0.0.1", seconds=30) as sending:
        source = sending.source("float32")
        [sent] = engine.ensure(CONFIG, uris[0], uris[1], 1, RefitOptions(digests[1], source.model_dump()))
    assert (sent.transport, sent.transport_note, sending.sent) == ("transfer", None, 1)
    require_agreement([sent], "float32")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there: of a sender that has gone, or that a NetworkPolicy hides
        hidden = source.model_copy(update={"port": taken.getsockname()[1]})
        [read] = engine.ensure(CONFIG, uris[0], uris[0], 2, RefitOptions(digests[0], hidden.model_dump()))
    assert (read.transport, read.policy_version) == ("store", 2)
    assert "k8s/components/weight-transfer" in str(read.transport_note)
    assert read.probe != sent.probe
    with pytest.raises(DeploymentFailed, match="no safetensors files"):
        engine.ensure(CONFIG, uris[0], nothing, 3)
    [last] = engine.ensure(CONFIG, uris[0], uris[1], 4)
    assert last.probe == sent.probe
    assert {one.pid for one in (sent, read, last)} == {first.pid}, "in place"
    assert {one.replica_id for one in (sent, read, last)} == {first.replica_id}
