"""What a run has on the cluster: made once, found again by its name.

Invariant: an object is this run's exactly when it carries the run's uid and the digest of what it is to do. Whoever comes
second, also after a crash, finds the first one's; an object that has the name by accident is refused, never touched.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from roundhouse.errors import ConfigError, InfraError
from roundhouse.infra.kubernetes.cluster import ApiRefused, Cluster, explained
from roundhouse.infra.kubernetes.names import LABEL

Object = dict[str, Any]


class Owned(Protocol):
    """What belongs to a run (`job.JobPlan`)."""

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
        """The run's ConfigMap, which owns the rest, made once, with the headless Service where ranks need one."""
        wanted = plan.run_object()
        name = wanted["metadata"]["name"]
        with self._owning:  # of many Jobs that begin together, one asks
            if name not in self._owners:
                owner = self.ensure("v1", "configmaps", wanted)
                if (service := plan.run_service(owner)) is not None:
                    self.ensure("v1", "services", service)
                self._owners[name] = owner
            return self._owners[name]

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
            found = self._cluster.get(f"{path}/{name}")
        except ApiRefused as refused:
            if refused.status == 404:
                raise InfraError(f"{plural[:-1]} {name} was there and vanished while it was looked up.") from refused
            raise explained(refused, f"get {plural} in namespace {self._namespace}") from refused
        _require_ours(found, wanted, plural)
        return found


def _require_ours(found: Object, wanted: Object, plural: str) -> None:
    """Refuse an object that has the name by accident.

    Raises:
        ConfigError: it belongs to another run, or is to do something else.
    """
    name = wanted["metadata"]["name"]

    def told(item: Object) -> Mapping[str, Any]:
        metadata = item["metadata"]
        labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
        return {"run": labels.get(f"{LABEL}run-uid"), "digest": notes.get(f"{LABEL}digest")}

    if told(found) != told(wanted):
        raise ConfigError(
            f"There is a {plural[:-1]} {name} that is not this run's: {told(found)}, not {told(wanted)}. Delete it, or use "
            "another infra.namespace."
        )
