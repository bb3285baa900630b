"""Common parts of the Jobs of all stages: pure.

Invariant: the pods satisfy Pod Security `restricted`, hold no token of the cluster, and write only to their scratch
volumes and the store; they belong to the run's ConfigMap, and its deletion ends them. An error about a pod names
configuration keys of its section (`PodKeys`), never another stage's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roundhouse.config.kubernetes import Pods
from roundhouse.errors import EXIT_CODES, ConfigError, DataError, InfraError
from roundhouse.http.asgi import is_loopback
from roundhouse.logs import LABELS_VARIABLE, METRICS_VARIABLE
from roundhouse.plugins.kubernetes.names import StageIdentity, run_labels, run_object_name


@dataclass(frozen=True)
class PodKeys:
    """Configuration keys of one kind of pods."""

    section: str
    """`<section>.image`, `.memory`, `.pending_seconds`, …"""
    timeout: str
    """The time limit of the work itself."""
    secret: str
    environment: str
    less_memory: str
    """Other remedy for a lack of memory, as the end of a sentence."""
    out_of_memory: type[ConfigError | InfraError]
    """Error type, by whether a retry needs the same memory again or resumes from stored data."""

    @property
    def remedy_for_start(self) -> str:
        """Return the remedy for a container that cannot be made."""
        return f"Check {self.secret}, infra.store_claim and {self.environment}."


TRAINER = PodKeys(
    section="infra.trainer",
    timeout="train.service.timeout_seconds",
    secret="infra.secret",
    environment="infra.environment",
    less_memory="lower train.tokens_per_microbatch or infra.trainer.shared_memory, which counts as memory",
    out_of_memory=ConfigError,
)
COLLECTOR = PodKeys(
    section="infra.collector",
    timeout="rollout.distribution.timeout_seconds",
    secret="infra.collector.secret",
    environment="infra.collector.environment",
    less_memory="raise rollout.distribution.shards, so that each has fewer rollouts in flight",
    out_of_memory=InfraError,
)
GYM = PodKeys(
    section="infra.gym",
    timeout="environment.restarts",
    secret="infra.gym.secret",
    environment="infra.gym.environment",
    less_memory="spread its environments over several servers",
    out_of_memory=InfraError,
)


Manifest = dict[str, Any]

SCRATCH = "/scratch"
USER = 10001
"""Not root, and not a user of the node; the images make the same one."""
METRICS = "metrics"
"""Name of the port of the page for Prometheus, as in the manifests of `k8s/`."""
FINAL_EXIT_CODES = sorted(EXIT_CODES[kind] for kind in (DataError, ConfigError))
"""Exit codes of work for which repeating cannot help."""


def run_object(identity: StageIdentity, namespace: str, store: str) -> Manifest:
    """The ConfigMap that owns all else of the run: deleting it ends the run's Jobs."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": run_object_name(identity.run_id, identity.run_uid),
            "namespace": namespace,
            "labels": run_labels(identity.run_id, identity.run_uid),
        },
        "data": {"run_id": identity.run_id, "run_uid": identity.run_uid, "store": store},
    }


def owner_reference(owner: Manifest) -> Manifest:
    metadata = owner["metadata"]
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}


def pod_failure_policy(container: str, disrupted: Literal["Ignore", "FailJob"]) -> Manifest:
    """Fails the Job if repeating cannot help; `disrupted`: for a pod that was drained, preempted, or lost with its node."""
    codes = {"containerName": container, "operator": "In", "values": FINAL_EXIT_CODES}
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": codes},
            {"action": disrupted, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }


def pod(settings: Pods, container: Manifest, service_account: str, volumes: Sequence[Manifest] = ()) -> Manifest:
    """A pod of one container, with scratch."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "serviceAccountName": service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # as process 1 Python would not hear SIGTERM: each drain and cancellation would last the whole grace period
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": settings.scratch}}, *volumes],
        "priorityClassName": settings.priority_class,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [accepted.model_dump(exclude_none=True) for accepted in settings.tolerations],
    }
    return {name: value for name, value in spec.items() if value not in (None, {}, [])}


def container(
    name: str,
    image: str,
    settings: Pods,
    identity: StageIdentity,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    secret: str | None,
    *,
    mounts: Sequence[Manifest] = (),
    devices: Mapping[str, str] | None = None,
) -> Manifest:
    """Return a container with the interpreter, `arguments`, and its volumes.

    Args:
        devices: more resources, such as GPUs, as request and limit.
    """
    basic = {"HOME": SCRATCH, "TMPDIR": SCRATCH, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    variables = {**basic, LABELS_VARIABLE: json.dumps(identity.about()), **environment}
    manifest: Manifest = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python"],
        "args": list(arguments),
        "env": [{"name": name, "value": value} for name, value in sorted(variables.items())],
        "resources": {
            "requests": {
                "cpu": settings.cpu,
                "memory": settings.memory,
                "ephemeral-storage": settings.scratch,  # else a node without that disk is chosen, and evicts the pod later
                **(devices or {}),
            },
            "limits": {"memory": settings.memory, **(devices or {})},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # the last lines of the log are the message of a pod that failed without one
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH}, *mounts],
    }
    host, _, port = environment.get(METRICS_VARIABLE, "").rpartition(":")
    if port.isdigit() and host and not is_loopback(host.strip("[]")):  # the page for Prometheus is open to others
        manifest["ports"] = [{"name": METRICS, "containerPort": int(port)}]
    if secret:
        manifest["envFrom"] = [{"secretRef": {"name": secret}}]
    return manifest


def claimed(name: str, claim: str | None, path: str) -> tuple[list[Manifest], list[Manifest]]:
    """Volume and mount of a PersistentVolumeClaim; none without one."""
    if not claim:
        return [], []
    return [{"name": name, "persistentVolumeClaim": {"claimName": claim}}], [{"name": name, "mountPath": path}]
