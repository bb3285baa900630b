"""A RayService's application on a real Ray Serve: the test simulates KubeRay; Serve and the replicas are real.

The engine shares no disk with the flow: it fetches config and tokenizer from a bucket, and weights from there or from the
flow's process. It learns both addresses through `serveConfigV2`.
"""

from __future__ import annotations

import socket
import uuid
from pathlib import Path
from typing import Any

import pytest
import s3fs

from roundhouse.config.loading import parse_config
from roundhouse.errors import DeploymentFailed
from roundhouse.stages.checkpoint import publish, publish_starting_policy
from roundhouse.stages.refit import engine_service, refit_iteration
from roundhouse.store.run import open_run
from roundhouse.store.stage import Reference, read_manifest
from roundhouse.weight_sync.replica_state import RefitOptions
from roundhouse.weight_sync.tensor_files import digest_of
from tests.generation import tiny
from tests.generation.cluster import ray_head
from tests.plugins.kubernetes.kuberay import Operator, RealServe, install_crd
from tests.plugins.kubernetes.stand import Stand
from tests.plugins.kubernetes.test_rayservice import manifest
from tests.stages.test_checkpoint import trained

GENERATION = {
    "weight_sync": "transfer",
    "max_model_len": 512,
    "kv_cache_gib": 0.1,
    "start_timeout_seconds": 150,
    "refit_timeout_seconds": 60,
}


def proof(refitted: Reference) -> dict[str, Any]:
    """Return the report of the one replica at a refit."""
    details = read_manifest(refitted).details
    [replica] = details["replicas"]
    return {**replica, **details["proof"]}


@pytest.mark.long
def test_a_run_starts_the_application_of_a_rayservice_and_refits_its_replica_in_place(
    stand: Stand, s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pytest.importorskip("roundhouse.plugins.transfer.transport").TransferSource
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    bucket, name = f"rh-{uuid.uuid4().hex[:12]}", "engine"
    s3fs.S3FileSystem().call_s3("create_bucket", Bucket=bucket)
    directories = [tiny.make_model(tmp_path / str(version), seed=version) for version in (0, 1)]
    if stand.plane is not None:
        install_crd(stand.admin)
    path = f"/apis/ray.io/v1/namespaces/{stand.namespace}/rayservices"
    stand.admin.create(path, manifest(name, stand.namespace))
    with ray_head() as ray:
        operator = Operator(stand.admin, stand.namespace, RealServe(ray))
        infra = {
            "kind": "kubernetes",
            "namespace": stand.namespace,
            "engine": {"ray_service": name, "url": ray.http_url},
            "state": str(tmp_path / "state"),
        }
        tree = {"run_id": "a", "store": f"s3://{bucket}", "infra": infra, "generation": GENERATION}
        run = open_run(parse_config(tree))
        try:
            start = publish_starting_policy(run, directories[0], {})
            read = proof(refit_iteration(run, 1, start))
            sent = proof(refit_iteration(run, 2, publish(run, trained(run, 1, directories[1]))))
            assert [(each["way"], each["note"]) for each in (read, sent)] == [("store", None), ("transfer", None)]
            assert (sent["digest"], sent["pid"]) == (digest_of(directories[1]), read["pid"])
            assert sent["probe"] != read["probe"]

            engine, generation = engine_service(run), run.config.generation
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))  # nobody listens there: a sender that has gone
                gone = source(
                    dtype="float32",
                    address="127.0.0.1",
                    port=taken.getsockname()[1],
                    key="k",
                    replicas=[read["id"]],
                    seconds=9,
                )
                options = RefitOptions(digest_of(directories[0]), gone.model_dump())
                [again] = engine.ensure(generation, start.uri, start.uri, 2, options)
            assert (again.transport, again.probe, again.pid) == ("store", read["probe"], read["pid"])
            assert "k8s/components/weight-transfer" in str(again.transport_note)
            with pytest.raises(DeploymentFailed, match="No safetensors files"):
                engine.ensure(generation, start.uri, f"s3://{bucket}/nothing", 3)
            [last] = engine.ensure(generation, start.uri, start.uri, 4)
            assert (last.probe, last.pid, last.replica_id) == (read["probe"], read["pid"], read["id"])
        finally:
            operator.stop()
