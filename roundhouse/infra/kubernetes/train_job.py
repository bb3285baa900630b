"""The manifests of a training step: pure, from the configuration.

Invariant: equal arguments give equal manifests. The pods satisfy Pod Security `restricted`, hold no token of the cluster, and
write nothing but their scratch volumes and the store.

One pod runs the step itself, or torchrun over its own processes. Several pods are an Indexed Job: index 0 is the meeting point,
which the others find by its host name under the run's headless Service.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.train_service import ProcessService
from roundhouse.errors import ConfigError, DataError
from roundhouse.infra.kubernetes.names import LABEL, StageIdentity, run_labels, run_object_name
from roundhouse.logs import LABELS_VARIABLE
from roundhouse.store.location import Location
from roundhouse.training.service.exit_codes import EXIT_CODES

Manifest = dict[str, Any]

CONTAINER = "trainer"
STEP = "roundhouse.training.service.one_shot"
SCRATCH = "/scratch"
CACHE = f"{SCRATCH}/cache"
NODE_CACHE = "/cache"
"""Where `infra.trainer.cache_claim` is mounted."""
MEETING_PORT = 29500
USER = 10001
"""Not root, and not a user of the node; the images make the same one."""
FINAL_EXIT_CODES = sorted(EXIT_CODES[kind] for kind in (DataError, ConfigError))
"""Of a step for which repeating cannot help."""


@dataclass(frozen=True)
class TrainJob:
    """A step as a Job: what to create, and how long to wait for what."""

    identity: StageIdentity
    infra: KubernetesInfra
    service: ProcessService
    reports: str
    """URI of the directory below which each try has one of its own: `<reports>/<name>/spec.json`, `report.json`, …"""
    store: str
    """URI of the store's root."""

    @property
    def namespace(self) -> str:
        return self.infra.namespace

    @property
    def pods(self) -> int:
        return self.infra.trainer.pods

    def report(self, number: int) -> str:
        """Where a try leaves its result."""
        return f"{self.reports}/{self.identity.job_name(number)}"

    def run_object(self) -> Manifest:
        """The ConfigMap that owns all else of the run: deleting it ends the run's Jobs."""
        identity = self.identity
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": run_object_name(identity.run_id, identity.run_uid),
                "namespace": self.namespace,
                "labels": run_labels(identity.run_id, identity.run_uid),
            },
            "data": {"run_id": identity.run_id, "run_uid": identity.run_uid, "store": self.store},
        }

    def run_service(self, owner: Manifest) -> Manifest | None:
        """The headless Service that gives pods host names; None where there is one pod."""
        if self.pods == 1:
            return None
        identity = self.identity
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": run_object_name(identity.run_id, identity.run_uid),
                "namespace": self.namespace,
                "labels": run_labels(identity.run_id, identity.run_uid),
                "ownerReferences": [_owner_reference(owner)],
            },
            "spec": {
                "clusterIP": "None",
                # pods meet before they are ready
                "publishNotReadyAddresses": True,
                "selector": {f"{LABEL}run-uid": identity.run_uid},
                "ports": [{"name": "meeting", "port": MEETING_PORT, "protocol": "TCP"}],
            },
        }

    def job(self, number: int, owner: Manifest) -> Manifest:
        """The Job of a try."""
        trainer, labels = self.infra.trainer, self._labels()
        queue = {"kueue.x-k8s.io/queue-name": self.infra.queue} if self.infra.queue else {}
        spec: Manifest = {
            "completions": self.pods,
            "parallelism": self.pods,
            "completionMode": "Indexed",
            "backoffLimit": trainer.restarts if self.pods == 1 else 0,
            "activeDeadlineSeconds": self.seconds(),
            "ttlSecondsAfterFinished": self.infra.keep_jobs_seconds,
            "podFailurePolicy": self._pod_failure_policy(),
            "template": {"metadata": {"labels": labels}, "spec": self._pod(number)},
        }
        if self.infra.queue:
            spec["suspend"] = True  # until Kueue admits it
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": self.identity.job_name(number),
                "namespace": self.namespace,
                "labels": labels | queue,
                "annotations": {f"{LABEL}digest": self.identity.digest},
                "ownerReferences": [_owner_reference(owner)],
            },
            "spec": spec,
        }

    def seconds(self) -> int:
        """The Job's deadline: the wait for nodes, and the step."""
        return int(self.infra.trainer.pending_seconds + self.service.timeout_seconds)

    def _labels(self) -> dict[str, str]:
        return self.identity.labels() | {
            "app.kubernetes.io/name": "roundhouse-trainer",
            "app.kubernetes.io/component": "trainer",
        }

    def _pod_failure_policy(self) -> Manifest:
        # A disrupted pod (drain, preemption, lost node) is replaced. Its peers in a group of several have failed with it.
        disrupted = "Ignore" if self.pods == 1 else "FailJob"
        codes = {"containerName": CONTAINER, "operator": "In", "values": FINAL_EXIT_CODES}
        return {
            "rules": [
                {"action": "FailJob", "onExitCodes": codes},
                {"action": disrupted, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        }

    def _pod(self, number: int) -> Manifest:
        trainer, infra = self.infra.trainer, self.infra
        pod: Manifest = {
            "restartPolicy": "Never",
            "serviceAccountName": infra.service_account,
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
            "containers": [self._container(number)],
            "volumes": [
                {"name": "scratch", "emptyDir": {"sizeLimit": trainer.scratch}},
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": trainer.shared_memory}},
            ],
        }
        if self.pods > 1:
            pod["subdomain"] = run_object_name(self.identity.run_id, self.identity.run_uid)
        if infra.store_claim:
            pod["volumes"].append({"name": "store", "persistentVolumeClaim": {"claimName": infra.store_claim}})
        if trainer.cache_claim:
            pod["volumes"].append({"name": "cache", "persistentVolumeClaim": {"claimName": trainer.cache_claim}})
        if trainer.priority_class:
            pod["priorityClassName"] = trainer.priority_class
        if trainer.node_selector:
            pod["nodeSelector"] = dict(trainer.node_selector)
        if trainer.tolerations:
            pod["tolerations"] = [accepted.model_dump(exclude_none=True) for accepted in trainer.tolerations]
        return pod

    def _container(self, number: int) -> Manifest:
        trainer, infra = self.infra.trainer, self.infra
        gpus = {"nvidia.com/gpu": str(trainer.gpus)} if trainer.gpus else {}
        environment = {"HOME": SCRATCH, "TMPDIR": SCRATCH, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        identity = self.identity
        about = {"run": identity.run_id, "iteration": identity.iteration, "stage": identity.stage}
        environment |= {LABELS_VARIABLE: json.dumps(about)} | infra.environment
        container: Manifest = {
            "name": CONTAINER,
            "image": trainer.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python"],
            "args": self.command(number),
            "env": [{"name": name, "value": value} for name, value in sorted(environment.items())],
            "resources": {
                "requests": {"cpu": trainer.cpu, "memory": trainer.memory} | gpus,
                "limits": {"memory": trainer.memory} | gpus,
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            # the last lines of the log are the message of a pod that failed without one
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "scratch", "mountPath": SCRATCH},
                {"name": "memory", "mountPath": "/dev/shm"},
            ],
        }
        if infra.store_claim:
            path = str(Location(self.store).local_path)
            container["volumeMounts"].append({"name": "store", "mountPath": path})
        if trainer.cache_claim:
            container["volumeMounts"].append({"name": "cache", "mountPath": NODE_CACHE})
        if infra.secret:
            container["envFrom"] = [{"secretRef": {"name": infra.secret}}]
        return container

    def command(self, number: int) -> list[str]:
        """Arguments of the interpreter in each pod."""
        step = ["-m", STEP, "--spec", f"{self.report(number)}/spec.json"]
        processes = self.service.processes
        if self.pods == 1:
            alone = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            return [*(alone if processes > 1 else []), *step]
        host = f"{self.identity.job_name(number)}-0.{run_object_name(self.identity.run_id, self.identity.run_uid)}"
        return [
            *("-m", "torch.distributed.run"),
            *("--nnodes", str(self.pods), "--node-rank", "$(JOB_COMPLETION_INDEX)"),
            *("--nproc-per-node", str(processes)),
            *("--master-addr", f"{host}.{self.namespace}.svc", "--master-port", str(MEETING_PORT)),
            *step,
        ]


def _owner_reference(owner: Manifest) -> Manifest:
    metadata = owner["metadata"]
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}
