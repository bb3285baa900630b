"""Workers of an engine and training Jobs in the queues of Kueue's own manager: admitted, preempted, resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.validation import ROOT
from tests.plugins.kubernetes.operators.scene import Scene, applied, items_of
from tests.waiting import until

Object = dict[str, Any]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
QUEUES = ROOT / "k8s/components/kueue/queues.yaml"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The overlay with the queues of an administrator, of which the quota is the test's."""
    with applied(tmp_path_factory.mktemp("overlay"), "kueue", engine=False) as ready:
        groups = [group["name"] for group in ready.admin.get("/apis").get("groups") or []]
        if "kueue.x-k8s.io" not in groups:
            pytest.skip("needs Kueue on the cluster")
        listed = "/apis/kueue.x-k8s.io/v1beta2/clusterqueues"
        until(lambda: not ready.admin.get(listed)["items"], "the end of an earlier test's queue")
        items = list(yaml.safe_load_all(QUEUES.read_text()))
        for item in items:
            if item["kind"] == "ClusterQueue":
                for resource in item["spec"]["resourceGroups"][0]["flavors"][0]["resources"]:
                    resource["nominalQuota"] = {"cpu": "1", "nvidia.com/gpu": "0"}.get(resource["name"], "100Gi")
        urgent = {
            "apiVersion": items[-1]["apiVersion"],
            "kind": "WorkloadPriorityClass",
            "metadata": {"name": "urgent"},
        }
        done = ready.apply([*items, urgent | {"value": 1_000_000}])
        assert done.returncode == 0, done.stderr
        try:
            yield ready
            print("\n" + json.dumps(ready.measured, indent=2), flush=True)
        finally:
            ready.admin.delete(f"{listed}/roundhouse", propagation="Background")


def queued_job(scene: Scene, name: str, cpu: str, priority: str, seconds: int) -> Object:
    labels = {"kueue.x-k8s.io/queue-name": "training", "kueue.x-k8s.io/priority-class": priority}
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "main",
        "image": scene.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", str(seconds)],
        "securityContext": security,
        "resources": {"requests": {"cpu": cpu, "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": scene.namespace, "labels": labels},
        "spec": {"suspend": True, "backoffLimit": 0, "template": {"spec": pod}},
    }


def workers(scene: Scene, phase: str) -> list[str]:
    """Return the UIDs of the engine's workers of a phase."""
    return [pod["metadata"]["uid"] for pod in scene.pods("worker") if pod["status"].get("phase") == phase]


def is_waiting(scene: Scene) -> bool:
    """Return whether a worker of the engine waits in the queue."""
    return any(pod["spec"].get("schedulingGates") for pod in scene.pods("worker"))


def test_a_worker_of_the_engine_is_admitted_by_the_queue(scene: Scene, tmp_path: Path) -> None:
    items = items_of(scene.namespace, tmp_path, scene.image, "kueue")
    [service] = [item for item in items if item["kind"] == "RayService"]
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0] |= {"minReplicas": 1, "replicas": 1}  # as a run asks
    began = time.monotonic()
    accepted = scene.apply([service])
    assert accepted.returncode == 0, accepted.stderr
    until(lambda: scene.pods("worker"), "a worker", seconds=300, evidence=scene.evidence)
    asked = time.monotonic()
    scene.measure("worker made to admitted by Kueue", lambda: not is_waiting(scene), asked)
    scene.measure("RayService applied to a running worker", lambda: workers(scene, "Running"), began)
    queued = [each["spec"] for each in scene.listed("workloads")]
    assert [(each["queueName"], each["priority"]) for each in queued] == [("engines", 300)]


def test_a_job_of_higher_priority_takes_the_workers_place_and_gives_it_back(scene: Scene) -> None:
    [before] = workers(scene, "Running")
    scene.admin.create(scene.path("jobs"), queued_job(scene, "urgent", "960m", "urgent", 60))
    began, job = time.monotonic(), scene.path("jobs", "urgent")
    scene.measure("job of higher priority to its start", lambda: scene.admin.get(job)["status"].get("startTime"), began)
    scene.measure("job of higher priority to the worker gone", lambda: before not in workers(scene, "Running"), began)
    scene.measure("job of higher priority to the next worker in the queue", lambda: is_waiting(scene), began)
    assert len(scene.pods("head")) == 1, "it holds no GPU"
    until(lambda: scene.admin.get(job)["status"].get("succeeded"), "the job's end", seconds=300)
    ended = time.monotonic()
    scene.measure("end of that job to the next worker admitted", lambda: not is_waiting(scene), ended)
    scene.measure("end of that job to a running worker", lambda: workers(scene, "Running"), ended)


def test_a_job_of_lower_priority_waits_for_the_engine(scene: Scene) -> None:
    scene.admin.create(scene.path("jobs"), queued_job(scene, "low", "980m", "roundhouse-trainer", 1))
    time.sleep(10)
    assert scene.admin.get(scene.path("jobs", "low"))["spec"]["suspend"] is True
    assert workers(scene, "Running")
