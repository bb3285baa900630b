"""A RayService's application on a real Ray Serve: KubeRay is played by the test, Serve and the replicas are real.

The engine has no disk in common with the flow: it fetches config, tokenizer and weights from a bucket.
"""

from __future__ import annotations

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


@pytest.mark.long
def test_the_flow_starts_the_application_of_a_rayservice_and_refits_its_replica_in_place(
    stand: Stand, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    bucket, name = f"rh-{uuid.uuid4().hex[:12]}", "engine"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=bucket)
    run = Location(f"s3://{bucket}/runs/a")
    uris = [
        committed(run / f"checkpoints/{version:06d}", tiny.make_model(tmp_path / str(version), seed=version), version)
        for version in (0, 1)
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
            [first] = engine.ensure(CONFIG, uris[0], uris[0], 0)
            [second] = engine.ensure(CONFIG, uris[0], uris[1], 1)
            assert (first.policy_version, second.policy_version, second.weights) == (0, 1, uris[1])
            assert (first.pid, first.replica_id) == (second.pid, second.replica_id), "in place"
            with pytest.raises(DeploymentFailed, match="no safetensors files"):
                engine.ensure(CONFIG, uris[0], f"s3://{bucket}/nothing", 2)
            assert engine.ensure(CONFIG, uris[0], uris[1], 1)[0].pid == first.pid
        finally:
            operator.stop()
