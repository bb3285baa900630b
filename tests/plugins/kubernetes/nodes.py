"""A cluster that runs containers, for tests: the cluster of `KUBECONFIG`, with the images on its nodes.

    export KUBECONFIG=… ROUNDHOUSE_IMAGES=flow=roundhouse/flow:0.1.0,trainer=…,engine=…,gym=…
    pytest tests/plugins/kubernetes/test_cluster*.py

Invariant: all objects of a test are in a separate namespace, which is deleted at its end. It needs the right to create
namespaces and priority classes, and for a run a volume: a default storage class, or a free PersistentVolume.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.training import ProcessService
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster
from roundhouse.plugins.kubernetes.job import RunJobs
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob
from tests.plugins.kubernetes.stand import cluster_of

Object = dict[str, Any]

VARIABLE = "ROUNDHOUSE_IMAGES"
ROLES = ("flow", "trainer", "engine", "gym")
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def images(*roles: str) -> dict[str, str]:
    """Images of the roles; skips the test without a cluster or without one of the images."""
    if "KUBECONFIG" not in os.environ:
        pytest.skip("needs a cluster: set KUBECONFIG")
    pairs = [item.partition("=") for item in os.environ.get(VARIABLE, "").split(",") if item]
    named = {role: image for role, _, image in pairs}
    assert set(named) <= set(ROLES), f"{VARIABLE} has {sorted(named)}; there are {ROLES}"
    if missing := [role for role in roles if role not in named]:
        pytest.skip(f"needs images on the cluster: name one for {', '.join(missing)} in {VARIABLE}")
    return named


@dataclass(frozen=True)
class Command(TrainJob):
    """A training Job with another program in its pods; the manifest is the real one."""

    program: str = ""

    def command(self, number: int) -> list[str]:
        return ["-c", self.program]


@dataclass
class Nodes:
    """A namespace of a cluster with nodes."""

    cluster: Cluster
    namespace: str
    image: str
    """Of the trainer."""

    def plan(self, program: str, digest: str = "", **infra: Any) -> Command:
        trainer = {
            **{"image": self.image, "cpu": "50m", "memory": "64Mi", "scratch": "1Gi", "shared_memory": "16Mi"},
            **infra.pop("trainer", {}),
        }
        service = ProcessService(**infra.pop("service", {}))
        settings = KubernetesInfra.model_validate({"namespace": self.namespace, "trainer": trainer, **infra})
        identity = StageIdentity("drill", self.run_uid, 1, "train", digest or uuid.uuid4().hex[:12])
        return Command(identity, settings, service, reports="file:///r", store="file:///s", program=program)

    @property
    def run_uid(self) -> str:
        return (self.namespace.removeprefix("rh-test-") * 2)[:12]

    def run(self, plan: TrainJob, say: Callable[[str], None] = lambda line: None) -> int:
        with RunJobs(self.cluster, self.namespace, self.run_uid) as jobs:
            return jobs.run(plan, say)

    def path(self, plural: str) -> str:
        group = {"jobs": "/apis/batch/v1", "deployments": "/apis/apps/v1"}.get(plural, "/api/v1")
        return f"{group}/namespaces/{self.namespace}/{plural}"

    def found(self, plural: str, selector: str = "") -> list[Object]:
        return self.cluster.get(self.path(plural), labelSelector=selector).get("items") or []

    def log(self, pod: str) -> str:
        """Return the whole log, also after the end; empty if it does not exist (yet)."""
        try:
            answer = self.cluster.stream(f"{self.path('pods')}/{pod}/log", {}, 20)
        except ApiRefused as refused:
            return f"<{refused}>"
        return answer.data.decode(errors="replace")

    def evict(self, pod: str) -> None:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        self.cluster.create(f"{self.path('pods')}/{pod}/eviction", body)


@contextmanager
def fresh_namespace(image: str) -> Iterator[Nodes]:
    """One with Pod Security `restricted` and the trainer's account, deleted in the end with all that is in it."""
    cluster = cluster_of(Path(os.environ["KUBECONFIG"]), patience=60)
    nodes = Nodes(cluster, f"rh-test-{uuid.uuid4().hex[:8]}", image)
    metadata = {"name": nodes.namespace, "labels": RESTRICTED}
    cluster.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    try:
        yield nodes
    finally:
        cluster.delete(f"/api/v1/namespaces/{nodes.namespace}", propagation="Background")
        cluster.close()
