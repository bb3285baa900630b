"""The base of the Job tests: an API server, a proxy with faults, and a kubelet."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client, config

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.training import ProcessService
from roundhouse.plugins.kubernetes.cluster import Cluster
from roundhouse.plugins.kubernetes.job import RunJobs
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob
from tests.k8s.api_server import ApiState, api_server
from tests.plugins.kubernetes.control_plane import ControlPlane
from tests.plugins.kubernetes.fault_proxy import Faults, fault_proxy
from tests.plugins.kubernetes.players import JobController, Kubelet

PATIENCE = 20.0


@dataclass
class Stand:
    """Everything a test needs."""

    cluster: Cluster
    """Of the code under test, through the faults."""
    admin: Cluster
    """Straight."""
    faults: Faults
    kubelet: Kubelet
    namespace: str
    state: ApiState | None
    """Of the fake; None before a real API server."""
    plane: ControlPlane | None
    kubeconfig: Path
    said: list[str] = field(default_factory=list)

    def plan(self, run_uid: str = "0123456789ab", digest: str = "89abcdef0123", **infra: Any) -> TrainJob:
        trainer = {"cpu": "100m", "memory": "64Mi", "scratch": "1Gi", "shared_memory": "16Mi"} | infra.pop(
            "trainer", {}
        )
        service = ProcessService(**infra.pop("service", {}))
        settings = KubernetesInfra.model_validate({"namespace": self.namespace, "trainer": trainer, **infra})
        identity = StageIdentity("My_run.1", run_uid, 3, "train", digest)
        return TrainJob(identity, settings, service, reports="s3://bucket/reports", store="s3://bucket")

    def jobs(self, run_uid: str = "0123456789ab") -> RunJobs:
        return RunJobs(self.cluster, self.namespace, run_uid)

    def run(self, plan: TrainJob) -> int:
        with self.jobs(plan.identity.run_uid) as jobs:
            return jobs.run(plan, self.said.append)

    def begin(self, plan: TrainJob) -> Begun:
        return Begun(self, plan)

    def found(self, plural: str) -> list[dict[str, Any]]:
        group = "/apis/batch/v1" if plural == "jobs" else "/api/v1"
        items = self.admin.get(f"{group}/namespaces/{self.namespace}/{plural}").get("items") or []
        return [item for item in items if "roundhouse/run-uid" in (item["metadata"].get("labels") or {})]


class Begun:
    """A run under way in a thread, and what became of it."""

    def __init__(self, stand: Stand, plan: TrainJob) -> None:
        self.number: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(stand, plan), daemon=True)
        self._thread.start()

    def _run(self, stand: Stand, plan: TrainJob) -> None:
        try:
            self.number = stand.run(plan)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def result(self, seconds: float = 30) -> int:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the run has not ended"
        if self.error is not None:
            raise self.error
        assert self.number is not None
        return self.number


def cluster_of(kubeconfig: Path, patience: float = PATIENCE) -> Cluster:
    settings = client.Configuration()
    config.load_kube_config(config_file=str(kubeconfig), client_configuration=settings)
    settings.retries = False
    return Cluster(client.ApiClient(settings), patience_seconds=patience)


def _plain_kubeconfig(url: str, file: Path) -> Path:
    import yaml

    tree = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    file.write_text(yaml.safe_dump(tree))
    return file


@contextmanager
def fake_stand(directory: Path) -> Iterator[Stand]:
    """Before the fake API server, with its small Job controller."""
    namespace = "roundhouse"
    with api_server() as (url, state), fault_proxy(url) as (proxied, faults):
        direct = cluster_of(_plain_kubeconfig(url, directory / "direct"))
        kubeconfig = _plain_kubeconfig(proxied, directory / "kubeconfig")
        controller = JobController(state, namespace)
        kubelet = Kubelet(cluster_of(directory / "direct"), namespace, state)
        try:
            yield Stand(cluster_of(kubeconfig), direct, faults, kubelet, namespace, state, None, kubeconfig)
        finally:
            kubelet.stop()
            controller.stop()


@contextmanager
def real_stand(plane: ControlPlane) -> Iterator[Stand]:
    """Yield a stand with a real API server and Job controller, in a separate namespace."""
    namespace = f"rh-{uuid.uuid4().hex[:8]}"
    admin = cluster_of(plane.kubeconfig())
    admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    with fault_proxy(plane.url, plane.tls()) as (proxied, faults):
        kubeconfig = plane.kubeconfig(proxied)
        kubelet = Kubelet(cluster_of(plane.kubeconfig()), namespace)
        try:
            yield Stand(cluster_of(kubeconfig), admin, faults, kubelet, namespace, None, plane, kubeconfig)
        finally:
            kubelet.stop()
            admin.delete(f"/api/v1/namespaces/{namespace}", propagation="Background")
