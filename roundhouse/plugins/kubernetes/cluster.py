"""Calls of a cluster's API server, and a run's objects there (`OwnedResources`): made once, found again by name.

Invariant: every call has a time limit and is counted. Errors that may pass (429, 500, 502 to 504, a create that met
another write of its quota, a broken connection, a restarting server) are retried with back-off until `patience_seconds`
are over; callers choose names so that a repeated create finds its own object. Other errors name the missing right or
object.

The official client provides credentials, TLS and token renewal; bodies are plain JSON, as manifests are.

An object belongs to this run exactly if it carries the run's uid and the digest of its work. A second attempt, also
after a crash, finds the first one's; another object of the name is refused, never touched.
"""

from __future__ import annotations

import email.utils
import itertools
import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from roundhouse.config.kubernetes import IN_CLUSTER_NAMESPACE, KubernetesInfra
from roundhouse.errors import ConfigError, InfraError
from roundhouse.plugins.kubernetes.names import LABEL
from roundhouse.retry import Backoff

if TYPE_CHECKING:
    import urllib3
    from kubernetes.client import ApiClient

logger = logging.getLogger(__name__)

Object = dict[str, Any]

CALL_SECONDS = (10.0, 30.0)
"""To connect, and between two bytes of an answer."""
_PASSING = (408, 429, 500, 502, 503, 504)
_CONTENDED = "Conflict"
"""Reason of a 409 of a create that met another write of its namespace's quota; a name that is taken is `AlreadyExists`."""
_BACKOFF = Backoff(0.2, longest=15.0, spread=0.5)


class ApiRefused(Exception):
    """A final error answer; the caller interprets it."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message
        self.retry_after = retry_after


class Cluster:
    """One API server, as one user. Usable from several threads."""

    def __init__(self, client: ApiClient, *, patience_seconds: float = 300) -> None:
        self._client = client
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self._closed = False
        self.calls: Counter[str] = Counter()
        """Requests sent, repeated ones too, by verb and kind: `create jobs`."""

    @property
    def host(self) -> str:
        return str(self._client.configuration.host)

    @property
    def patience_seconds(self) -> float:
        return self._patience

    def close(self) -> None:
        """No call is sent from here on, also none that a thread had been about to repeat."""
        with self._lock:
            self._closed = True
        self._client.close()

    def create(self, path: str, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object; unknown fields are refused. A dry run goes through all checks and creates nothing.

        Raises:
            ApiRefused: 409 when there is one of that name, 422 when the server does not accept it.
        """
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._json("POST", path, query, body)

    def get(self, path: str, **query: str) -> Object:
        return self._json("GET", path, query)

    def delete(self, path: str, *, propagation: str = "Foreground", uid: str | None = None) -> bool:
        """Begin to delete an object; False when it is not there (any more, or is another one by now)."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", path, {}, body)
        except ApiRefused as refused:
            if refused.status in (404, 409):
                return False
            raise
        return True

    def patch(self, path: str, body: Object, content_type: str = "application/merge-patch+json") -> Object:
        return self._json("PATCH", path, {}, body, {"Content-Type": content_type})

    def apply(self, path: str, body: Object, manager: str) -> Object:
        """Server-side apply: the fields in the body are the manager's from then on, and no others change.

        Raises:
            ApiRefused: 409 when the body names a resourceVersion that is not the newest.
        """
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"}
        return self._json("PATCH", path, query, body, {"Content-Type": "application/apply-patch+yaml"})

    def stream(self, path: str, query: Mapping[str, str], read_seconds: float) -> urllib3.HTTPResponse:
        """An answer that is read as it comes: a watch, a log. Not repeated.

        Raises:
            ApiRefused: any status but success.
            urllib3.exceptions.HTTPError: the connection broke.
        """
        verb = "watch" if query.get("watch") else "follow"
        return self._send("GET", path, query, None, {}, (CALL_SECONDS[0], read_seconds), verb)

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        headers: Object | None = None,
    ) -> Object:
        from urllib3.exceptions import HTTPError

        deadline = time.monotonic() + self._patience
        for attempt in itertools.count(1):
            wait = None
            try:
                answer = self._send(method, path, query, body, headers or {}, CALL_SECONDS, _VERBS[method])
                return json.loads(answer.data)
            except ApiRefused as refused:
                if refused.status not in _PASSING and not (method == "POST" and refused.reason == _CONTENDED):
                    raise
                problem, wait = str(refused), refused.retry_after
            except (HTTPError, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            wait = min(_BACKOFF.pause(attempt) if wait is None else wait, _BACKOFF.longest)
            if time.monotonic() + wait > deadline:
                raise InfraError(
                    f"The API server {self.host} did not do {method} {path} for {self._patience:g} s "
                    f"(infra.api_outage_seconds). Last message: {problem}"
                )
            logger.info("%s %s: %s; again in %.1f s", method, path, problem, wait)
            time.sleep(wait)
        raise AssertionError("attempts never end")

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        headers: Object,
        seconds: tuple[float, float],
        verb: str,
    ) -> urllib3.HTTPResponse:
        with self._lock:
            if self._closed:
                raise InfraError(f"{method} {path} is not sent: the connection to the cluster was closed.")
            self.calls[f"{verb} {_kind(path)}"] += 1
        parameters = self._client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": "application/json"} | headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = self._client.call_api(*parameters, _request_timeout=seconds).response
        if answer.status >= 300:
            text = answer.data.decode(errors="replace")
            try:
                status = json.loads(text)
                reason, message = str(status.get("reason", "")), str(status.get("message", ""))
            except (ValueError, AttributeError):
                reason, message = str(answer.reason or ""), text[:500]
            value = answer.headers.get("Retry-After")  # seconds, or a date
            if value is None:
                retry_after = None
            elif value.strip().isdigit():
                retry_after = float(value)
            else:
                moment = email.utils.parsedate_tz(value)
                retry_after = None if moment is None else max(0.0, email.utils.mktime_tz(moment) - time.time())
            raise ApiRefused(answer.status, reason, message, retry_after)
        return answer


def connect(infra: KubernetesInfra) -> Cluster:
    """The cluster of this pod's service account, or of the kubeconfig.

    Raises:
        ConfigError: there is neither, or the context is not in the kubeconfig.
    """
    from kubernetes import client, config

    settings = client.Configuration()
    try:
        if infra.context is None and "KUBERNETES_SERVICE_HOST" in os.environ and os.path.exists(IN_CLUSTER_NAMESPACE):
            config.load_incluster_config(client_configuration=settings)
        else:
            # the library reads KUBECONFIG when it is imported, which may have been earlier
            file = os.environ.get("KUBECONFIG")
            config.load_kube_config(config_file=file, context=infra.context, client_configuration=settings)
    except config.ConfigException as error:
        raise ConfigError(
            f"infra.kind is kubernetes, but no cluster is configured here: {error}. Set KUBECONFIG, or infra.context to one of "
            "its contexts; in a pod, mount the token of a service account."
        ) from error
    settings.retries = False  # retried here, with a count
    settings.connection_pool_maxsize = 512  # kept, not opened: each shard's Job has a separate log
    return Cluster(client.ApiClient(settings), patience_seconds=infra.api_outage_seconds)


def explained(refused: ApiRefused, doing: str) -> ConfigError | InfraError:
    """A refusal as the error that a person gets."""
    if refused.status == 401:
        return ConfigError(
            f"The API server rejects the credentials for: {doing}: {refused.message}. Renew the kubeconfig or token."
        )
    if refused.status == 403 and "exceeded quota" in refused.message:
        return InfraError(f"The namespace's quota does not allow to {doing} now: {refused.message}")
    if refused.status == 403:
        return ConfigError(
            f"Not allowed to {doing}: {refused.message}. Grant it to the flow's service account (k8s/base/rbac.yaml); "
            "`roundhouse doctor --kubernetes` lists the missing rights."
        )
    if refused.status == 404:
        return ConfigError(f"Cannot {doing}: {refused.message}. Does infra.namespace exist (k8s/base)?")
    return ConfigError(f"The API server refuses to {doing} ({refused.status}): {refused.message}")


_VERBS = {"GET": "get", "POST": "create", "DELETE": "delete", "PATCH": "patch"}


def _kind(path: str) -> str:
    """The plural in a path: /apis/batch/v1/namespaces/x/jobs/y -> jobs."""
    parts = path.strip("/").split("/")
    if "namespaces" in parts[:-2]:
        return "/".join(parts[parts.index("namespaces") + 2 :][::2])
    return parts[-1]


class Owned(Protocol):
    """Objects of a run (`stage_jobs.StageJob`)."""

    def run_object(self) -> Object: ...
    def run_service(self, owner: Object) -> Object | None: ...


class OwnedResources:
    """A run's objects in one namespace. Usable from several threads."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._owners: dict[str, Object] = {}
        self._owning = threading.Lock()

    def path(self, version: str, plural: str) -> str:
        prefix = "/api" if "/" not in version else "/apis"
        return f"{prefix}/{version}/namespaces/{self._namespace}/{plural}"

    def owner(self, plan: Owned) -> Object:
        """Return the run's ConfigMap, which owns the rest, made once, with the headless Service if ranks need one."""
        manifest = plan.run_object()
        name = manifest["metadata"]["name"]
        with self._owning:  # of many Jobs that begin together, one asks
            if name not in self._owners:
                owner = self.ensure("v1", "configmaps", manifest)
                if (service := plan.run_service(owner)) is not None:
                    self.ensure("v1", "services", service)
                self._owners[name] = owner
            return self._owners[name]

    def flow(self) -> Object | None:
        """Return the owner of a flow in a pod of the namespace: the Job of its pod, else the pod; None for a flow
        elsewhere."""
        selector = f"metadata.name={socket.gethostname()}"
        for pod in self._cluster.get(self.path("v1", "pods"), fieldSelector=selector).get("items") or []:
            for owner in pod["metadata"].get("ownerReferences") or []:
                if owner.get("controller"):
                    return {**owner, "metadata": {"name": owner["name"], "uid": owner["uid"]}}
            return {"apiVersion": "v1", "kind": "Pod", "metadata": pod["metadata"]}
        return None

    def ensure(self, version: str, plural: str, wanted: Object) -> Object:
        """Create an object, or find the one of the name that is this run's.

        Raises:
            ConfigError: it is another's, or may not be made.
        """
        path, name = self.path(version, plural), wanted["metadata"]["name"]
        try:
            return self._cluster.create(path, wanted)
        except ApiRefused as refused:
            if refused.status != 409:
                raise explained(refused, f"create {plural} in namespace {self._namespace}") from refused
        try:
            current = self._cluster.get(f"{path}/{name}")
        except ApiRefused as refused:
            if refused.status == 404:
                raise InfraError(f"{plural[:-1]} {name} was there and vanished while it was looked up.") from refused
            raise explained(refused, f"get {plural} in namespace {self._namespace}") from refused
        own = wanted["metadata"]["name"]

        def owner(item: Object) -> Mapping[str, Any]:
            metadata = item["metadata"]
            labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
            return {"run": labels.get(f"{LABEL}run-uid"), "digest": notes.get(f"{LABEL}digest")}

        if owner(current) != owner(wanted):
            raise ConfigError(
                f"There is a {plural[:-1]} {own} that is not this run's: {owner(current)}, not {owner(wanted)}. "
                "Delete it, or use another infra.namespace."
            )
        return current
