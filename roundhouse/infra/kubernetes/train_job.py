"""The manifests of a training step: pure, from the configuration.

Invariant: equal arguments give equal manifests, restricted as those of all stages (`stage_pod`).

One pod runs the step itself, or torchrun over its own processes. Several pods are an Indexed Job: index 0 is the meeting point,
which the others find by its host name under the run's headless Service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roundhouse.config.kubernetes import TRAINER_IMAGE, KubernetesInfra, TrainerPods
from roundhouse.config.training import ProcessService
from roundhouse.infra.kubernetes import stage_pod
from roundhouse.infra.kubernetes.names import LABEL, StageIdentity, component_labels, run_labels, run_object_name
from roundhouse.infra.kubernetes.stage_pod import TRAINER, PodKeys

Manifest = dict[str, Any]

CONTAINER = "trainer"
STEP = "roundhouse.training.service.one_shot"
CACHE = f"{stage_pod.SCRATCH}/cache"
NODE_CACHE = "/cache"
"""Where `infra.trainer.cache_claim` is mounted."""
MEETING_PORT = 29500


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

    @property
    def keys(self) -> PodKeys:
        return TRAINER

    @property
    def settings(self) -> TrainerPods:
        return self.infra.trainer

    def run_object(self) -> Manifest:
        return stage_pod.run_object(self.identity, self.namespace, self.store)

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
                "ownerReferences": [stage_pod.owner_reference(owner)],
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
        spec = {
            "completions": self.pods,
            "parallelism": self.pods,
            "completionMode": "Indexed",
            "backoffLimit": self.infra.trainer.restarts if self.pods == 1 else 0,
            "activeDeadlineSeconds": self.seconds(),
            "ttlSecondsAfterFinished": self.infra.keep_jobs_seconds,
            # a disrupted pod is replaced; its peers in a group of several have failed with it
            "podFailurePolicy": stage_pod.pod_failure_policy(CONTAINER, "Ignore" if self.pods == 1 else "FailJob"),
        }
        labels = self.identity.labels() | component_labels("trainer")
        return stage_pod.job(
            self.identity, number, self.namespace, owner, spec, self._pod(number), labels, self.infra.queue
        )

    def seconds(self) -> int:
        """The Job's deadline: the wait for nodes, and the step."""
        return int(self.infra.trainer.pending_seconds + self.service.timeout_seconds)

    def _pod(self, number: int) -> Manifest:
        infra, trainer = self.infra, self.infra.trainer
        claim = trainer.cache_claim
        cache = [{"name": "cache", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
        cache_mount = [{"name": "cache", "mountPath": NODE_CACHE}] if claim else []
        container = stage_pod.container(
            CONTAINER,
            trainer.image or f"{TRAINER_IMAGE}-{'cuda' if trainer.gpus else 'cpu'}",
            trainer,
            self.identity,
            self.command(number),
            infra.environment,
            store=self.store,
            store_claim=infra.store_claim,
            secret=infra.secret,
            mounts=[{"name": "memory", "mountPath": "/dev/shm"}, *cache_mount],
            devices={"nvidia.com/gpu": str(trainer.gpus)} if trainer.gpus else {},
        )
        memory = {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": trainer.shared_memory}}
        pod = stage_pod.pod(trainer, container, infra.service_account, [memory, *cache], infra.store_claim)
        if self.pods > 1:
            pod["subdomain"] = run_object_name(self.identity.run_id, self.identity.run_uid)
        return pod

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
