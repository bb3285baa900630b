"""The overlay `gpu` on a cluster that runs KubeRay's own operator: without GPUs and small, otherwise as it is shipped.

    KUBECONFIG=…  ROUNDHOUSE_IMAGES=engine=roundhouse/engine:0.1.0-cuda,engine-next=…  ROUNDHOUSE_HOST=10.210.0.1

`ROUNDHOUSE_HOST` is this machine's address as pods reach it: the bucket is a server here. The flow is this process, with the
token of the account roundhouse-flow; it reaches Services by their addresses.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster
from tests.k8s.validation import ROOT, rendered_at
from tests.plugins.kubernetes.stand import cluster_of
from tests.ports import free_port
from tests.waiting import until

Object = dict[str, Any]

SECONDS = 600.0
SIZES = {"requests": {"cpu": "50m", "memory": "256Mi", "ephemeral-storage": "64Mi"}, "limits": {"memory": "3Gi"}}
LEFT_OUT = ("Job", "Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget", "Service")
"""Kinds of the flow and the gym, which no drill here needs."""


def settings() -> dict[str, str]:
    """Return images and addresses; skip the test and name the missing ones."""
    images = dict(item.partition("=")[::2] for item in os.environ.get("ROUNDHOUSE_IMAGES", "").split(",") if item)
    values = {"KUBECONFIG": os.environ.get("KUBECONFIG"), "ROUNDHOUSE_HOST": os.environ.get("ROUNDHOUSE_HOST")}
    values |= {f"ROUNDHOUSE_IMAGES {name}=": images.get(name) for name in ("engine", "engine-next")}
    if missing := [name for name, value in values.items() if not value]:
        pytest.skip(f"needs a cluster with KubeRay's operator: set {', '.join(missing)}")
    return {name: str(value) for name, value in values.items()}


@dataclass
class Scene:
    """The applied overlay and its measurements."""

    admin: Cluster
    namespace: str
    kubeconfig: Path
    """Of the administrator."""
    bucket: str
    image: str
    next_image: str
    measured: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    """When the overlay was applied."""

    def path(self, plural: str, name: str = "") -> str:
        group = {"rayservices": "/apis/ray.io/v1", "rayclusters": "/apis/ray.io/v1", "jobs": "/apis/batch/v1"}
        group |= dict.fromkeys(("localqueues", "workloads"), "/apis/kueue.x-k8s.io/v1beta2")
        place = f"{group.get(plural, '/api/v1')}/namespaces/{self.namespace}/{plural}"
        return f"{place}/{name}" if name else place

    def apply(self, items: list[Object]) -> subprocess.CompletedProcess[str]:
        """Apply manifests as the administrator."""
        return apply(items, str(self.kubeconfig))

    def listed(self, plural: str, selector: str = "") -> list[Object]:
        return self.admin.get(self.path(plural), labelSelector=selector).get("items") or []

    def pods(self, kind: str) -> list[Object]:
        """Return the living pods of the Ray cluster: head or worker."""
        pods = self.listed("pods", f"ray.io/node-type={kind}")
        return [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]

    def service(self) -> Object:
        return self.admin.get(self.path("rayservices", "roundhouse-engine"))

    def is_ready(self) -> bool:
        conditions = self.service().get("status", {}).get("conditions") or []
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    def measure(
        self, name: str, holds: Callable[[], Any], since: float | None = None, seconds: float = SECONDS
    ) -> None:
        """Wait, and record the seconds since a moment as a row of the table."""
        began = time.monotonic() if since is None else since
        until(holds, name, seconds=seconds, evidence=self.evidence)
        self.measured[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {self.measured[name]} s", flush=True)

    def evidence(self) -> str:
        lines = [json.dumps(self.service().get("status", {}))[-1500:]]
        for pod in self.listed("pods"):
            states = {each["name"]: each["state"] for each in pod["status"].get("containerStatuses") or []}
            lines.append(f"{pod['metadata']['name']} {pod['status'].get('phase')} {json.dumps(states)[:600]}")
        return "\n".join(lines)


def items_of(namespace: str, directory: Path, image: str, *components: str) -> list[Object]:
    """Render the overlay `gpu` into a namespace of another name, for a node without GPUs."""
    k8s = Path(os.path.relpath(ROOT / "k8s", directory.resolve()))
    listed = [str(k8s / "components" / name) for name in components]
    tree = {"namespace": namespace, "resources": [str(k8s / "overlays/gpu")], "components": listed}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    items = [item for item in rendered_at(directory) if item["kind"] not in LEFT_OUT]
    for item in items:
        if item["kind"] != "RayService":
            continue
        cluster = item["spec"]["rayClusterConfig"]
        cluster["autoscalerOptions"]["resources"] = SIZES
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            [container] = group["template"]["spec"]["containers"]
            container |= {"image": image, "imagePullPolicy": "IfNotPresent", "resources": SIZES}
            for volume in group["template"]["spec"]["volumes"]:
                volume["emptyDir"]["sizeLimit"] = "1Gi"
        cluster["workerGroupSpecs"][0]["rayStartParams"] = {"num-cpus": "1"}
    return items


def apply(items: list[Object], admin: str) -> subprocess.CompletedProcess[str]:
    """Apply manifests by kubectl, server-side; the result of the command."""
    command = ["kubectl", "--kubeconfig", admin, "apply", "--server-side", "--force-conflicts", "-f", "-"]
    return subprocess.run(command, input=yaml.safe_dump_all(items), capture_output=True, text=True, timeout=120)


@contextmanager
def bucket_server(host: str) -> Iterator[dict[str, str]]:
    """Variables of a bucket server that pods reach."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def is_up() -> bool:
            with socket.socket() as client:
                return client.connect_ex((host, port)) == 0

        until(is_up, f"a server at {host}:{port}", process=process)
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.wait(10)


def way_to(host: str, namespace: str) -> Object:
    """The policy by which pods reach the bucket, which is at no port of HTTPS."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "bucket", "namespace": namespace},
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/component": "engine"}},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": {"cidr": f"{host}/32"}}]}],
        },
    }


@contextmanager
def names_of_services(admin: Cluster) -> Iterator[None]:
    """In the block, this process finds the Services of the cluster by name."""
    look_up = socket.getaddrinfo

    def by_service(host: Any, *rest: Any, **options: Any) -> Any:
        name, _, place = str(host).partition(".")
        if place.endswith(".svc"):
            try:
                spec = admin.get(f"/api/v1/namespaces/{place.removesuffix('.svc')}/services/{name}")["spec"]
            except ApiRefused as refused:
                raise socket.gaierror(socket.EAI_NONAME, str(refused)) from refused
            host = spec["clusterIP"]
        return look_up(host, *rest, **options)

    socket.getaddrinfo = by_service  # type: ignore[assignment]
    try:
        yield
    finally:
        socket.getaddrinfo = look_up


def flow_kubeconfig(admin: Cluster, namespace: str, source: Path, target: Path) -> Path:
    """A kubeconfig of the account roundhouse-flow."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/roundhouse-flow/token"
    spec = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
    tree = yaml.safe_load(source.read_text())
    tree["users"] = [{"name": "flow", "user": {"token": admin.create(path, spec)["status"]["token"]}}]
    [current] = [each for each in tree["contexts"] if each["name"] == tree["current-context"]]
    current["context"]["user"] = "flow"
    tree["contexts"] = [current]
    target.write_text(yaml.safe_dump(tree))
    return target


@contextmanager
def applied(directory: Path, *components: str, engine: bool = True) -> Iterator[Scene]:
    """Apply the overlay in a separate namespace, deleted at the end; without `engine`, without its RayService."""
    values = settings()
    kubeconfig = Path(values["KUBECONFIG"])
    admin = cluster_of(kubeconfig, patience=60)
    namespace, bucket = f"rh-{uuid.uuid4().hex[:6]}", f"rh-{uuid.uuid4().hex[:12]}"
    image, next_image = values["ROUNDHOUSE_IMAGES engine="], values["ROUNDHOUSE_IMAGES engine-next="]
    with bucket_server(values["ROUNDHOUSE_HOST"]) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        items = items_of(namespace, directory, image, *components)
        items = [item for item in items if engine or item["kind"] != "RayService"] + [
            way_to(values["ROUNDHOUSE_HOST"], namespace)
        ]
        first = [item for item in items if item["kind"] == "Namespace"]
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "roundhouse-store", "namespace": namespace},
        }
        done = apply([*first, secret | {"stringData": variables}, *items], str(kubeconfig))
        assert done.returncode == 0, done.stderr
        until(
            lambda: admin.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/roundhouse-flow"), "the flow's account"
        )
        flow = flow_kubeconfig(admin, namespace, kubeconfig, directory / "flow.kubeconfig")
        patch.setenv("KUBECONFIG", str(flow))
        try:
            with names_of_services(admin):
                yield Scene(admin, namespace, kubeconfig, bucket, image, next_image)
        finally:
            admin.delete(f"/api/v1/namespaces/{namespace}", propagation="Background")
            admin.close()
