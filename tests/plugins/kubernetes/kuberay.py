"""KubeRay's operator for a cluster without nodes, as far as the flow depends on it, and Serve applications behind it.

The operator follows KubeRay 1.6 (rayservice_controller.go): it reads Serve's status, then passes on a changed
`serveConfigV2` through Go's values (each number a float64), and stores the status that it read, one step late.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

import httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from roundhouse.generation.deployment import ServeEndpoint
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster
from roundhouse.weight_sync.replica_state import application_digest
from tests.k8s.validation import CRDS, crd_of
from tests.waiting import until

Object = dict[str, Any]

LOOK_SECONDS = 0.2
"""KubeRay: 2 s."""


class Serve(Protocol):
    """The dashboard of a Ray cluster, as the operator calls it."""

    def statuses(self) -> Object: ...
    def put(self, config: Object) -> None: ...


class FakeServe:
    """Serve's answers without Ray: replicas that apply every request at once, or as the test sets."""

    def __init__(self) -> None:
        self.config: Object = {"applications": []}
        self.puts: list[Object] = []
        self.error = ""
        """The application cannot be deployed, for this reason."""
        self.refusal: str | None = None
        """Replicas refuse the weights, for this reason."""
        self.holding = threading.Event()
        """Set: replicas do not take wishes."""
        self.held: Object | None = None

    def put(self, config: Object) -> None:
        ServeDeploySchema.model_validate(config)
        self.puts.append(config)
        self.config = config

    def statuses(self) -> Object:
        status = ("DEPLOY_FAILED", self.error) if self.error else ("RUNNING", "")
        return {
            each["name"]: {"status": status[0], "message": status[1], "serveDeploymentStatuses": {}}
            for each in self.config["applications"]
        }

    def replicas(self) -> list[Object]:
        found = [each for each in self.config["applications"] if each["name"] == "policy"]
        if not found or self.error:
            return []
        deployment, digest = found[0]["deployments"][0], application_digest(found[0]["args"])
        wanted = deployment["user_config"]
        if not self.holding.is_set() and not self.refusal:
            self.held = wanted
        held = self.held or {}
        return [
            {
                "replica_id": f"replica-{index}",
                "pid": 1,
                "application": digest,
                "ready": not self.refusal,
                "policy_version": held.get("policy_version"),
                "weights": held.get("weights"),
                "refit_seconds": 0.1,
                "error": self.refusal,
                "failed_request": wanted["request"] if self.refusal else None,
                "desired": wanted,
            }
            for index in range(deployment["num_replicas"])
        ]


@contextmanager
def answering(serve: FakeServe) -> Iterator[str]:
    """The URL of `<name>-serve-svc`."""

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps({"replicas": serve.replicas()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class RealServe:
    """The dashboard of a running Ray cluster."""

    def __init__(self, endpoint: ServeEndpoint) -> None:
        self._endpoint = endpoint
        headers = {"Authorization": f"Bearer {endpoint.token}"}
        self._dashboard = httpx.Client(base_url=endpoint.dashboard_url, headers=headers, timeout=30)

    def put(self, config: Object) -> None:
        url = httpx.URL(self._endpoint.http_url)
        # on a cluster, pods have addresses of their own; here Serve has to be told its port
        config = config | {"http_options": {"host": url.host, "port": url.port}}
        reply = self._dashboard.put("/api/serve/applications/", json=config)
        if reply.status_code >= 400:
            raise ValueError(reply.text)

    def statuses(self) -> Object:
        found = self._dashboard.get("/api/serve/applications/").json()["applications"]
        return {
            name: {
                "status": each["status"],
                "message": each.get("message") or "",
                "serveDeploymentStatuses": {
                    deployment: {"status": one["status"], "message": one.get("message") or ""}
                    for deployment, one in each["deployments"].items()
                },
            }
            for name, each in found.items()
        }


class Operator:
    """Looks at the RayServices of a namespace, one after the other, again and again."""

    def __init__(self, cluster: Cluster, namespace: str, serve: Serve) -> None:
        self._cluster, self._serve = cluster, serve
        self._path = f"/apis/ray.io/v1/namespaces/{namespace}/rayservices"
        self._clusters = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters"
        self._handed_on: dict[str, str] = {}
        self.specs: list[Object] = []
        """`rayClusterConfig` of each look that saw another one: more than one would be a new cluster."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            for service in self._cluster.get(self._path).get("items") or []:
                try:
                    self._look(service)
                except (ApiRefused, httpx.HTTPError):
                    continue  # as the operator: again at the next look

    def _look(self, service: Object) -> None:
        spec, metadata = service["spec"], service["metadata"]
        if self.specs[-1:] != [spec["rayClusterConfig"]]:
            self.specs.append(spec["rayClusterConfig"])
        cluster = self._cluster_of(service)
        text = spec.get("serveConfigV2") or ""
        statuses = self._serve.statuses()
        if self._handed_on.get(metadata["uid"]) != text:
            try:
                self._serve.put(through_go(yaml.safe_load(text) or {}))
            except ValueError as error:
                self._warn(metadata, f"fail to create / update Serve applications: {error}")
                return
            self._handed_on[metadata["uid"]] = text
        status = {
            "observedGeneration": metadata["generation"],
            "activeServiceStatus": {"rayClusterName": cluster, "applicationStatuses": statuses},
        }
        if status != service.get("status"):
            self._cluster.patch(f"{self._path}/{metadata['name']}/status", {"status": status})

    def _cluster_of(self, service: Object) -> str:
        """Return the name of the RayService's cluster; without one it is made of the template, which never changes it later."""
        name = ((service.get("status") or {}).get("activeServiceStatus") or {}).get("rayClusterName")
        if name is not None:
            try:
                self._cluster.get(f"{self._clusters}/{name}")
                return str(name)
            except ApiRefused as refused:
                if refused.status != 404:
                    raise
        name = f"{service['metadata']['name']}-{uuid.uuid4().hex[:5]}"
        spec = service["spec"]["rayClusterConfig"]
        body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name}, "spec": through_go(spec)}
        self._cluster.create(self._clusters, body)
        return name

    def _warn(self, metadata: Object, message: str) -> None:
        involved = {"kind": "RayService", "name": metadata["name"], "namespace": metadata["namespace"]}
        involved |= {"apiVersion": "ray.io/v1", "uid": metadata["uid"]}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "rayservice-"},
            "involvedObject": involved,
            "type": "Warning",
            "reason": "FailedToUpdateServeApplications",
            "message": message,
            "firstTimestamp": now,
            "lastTimestamp": now,
        }
        self._cluster.create(f"/api/v1/namespaces/{metadata['namespace']}/events", event)


def through_go(value: Any) -> Any:
    """Return a value after Go's encoding/json has read it into `map[string]any` and written it: the shortest digits of a
    float64."""
    if isinstance(value, dict):
        return {key: through_go(item) for key, item in value.items()}
    if isinstance(value, list):
        return [through_go(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    shortest = Decimal(repr(float(value)))
    return int(shortest) if shortest == shortest.to_integral_value() else float(value)


def install_crd(admin: Cluster) -> None:
    """Let a real API server know RayServices and RayClusters; skip where their definition is not at hand."""
    if not CRDS.is_dir():
        pytest.skip("needs KubeRay's CRDs in shared/kuberay-crds beside the repository")

    def is_known(plural: str) -> bool:
        try:
            return bool(admin.get(f"/apis/ray.io/v1/namespaces/default/{plural}"))
        except ApiRefused:
            return False

    for kind in ("RayService", "RayCluster"):
        plural = f"{kind.lower()}s"
        if not is_known(plural):
            admin.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd_of(kind))
            until(lambda plural=plural: is_known(plural), f"the definition of {plural}")
