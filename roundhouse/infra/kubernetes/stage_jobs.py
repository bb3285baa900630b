"""The manifests of a training step and of a shard of a collection: pure, from the configuration.

Invariant: equal arguments give equal manifests, restricted as those of all stages (`stage_pod`).

One pod runs a step itself, or torchrun over its own processes. Several pods are an Indexed Job: index 0 is the meeting point,
which the others find by its host name under the run's headless Service. A shard is one pod, and a pod of its own that failed,
for whatever reason, ends the Job: the launcher's caller counts the loss and decides about another try, which resumes with what
this one has written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roundhouse.config.kubernetes import TRAINER_IMAGE, CollectorPods, KubernetesInfra, TrainerPods
from roundhouse.config.rollout import Shards
from roundhouse.config.training import ProcessService
from roundhouse.infra.kubernetes import stage_pod
from roundhouse.infra.kubernetes.names import LABEL, StageIdentity, component_labels, run_labels, run_object_name
from roundhouse.infra.kubernetes.stage_pod import COLLECTOR, TRAINER, PodKeys

Manifest = dict[str, Any]

STEP = "roundhouse.training.service.one_shot"
CACHE = f"{stage_pod.SCRATCH}/cache"
NODE_CACHE = "/cache"
"""Where `infra.trainer.cache_claim` is mounted."""
MEETING_PORT = 29500
WORKER = "roundhouse.collection.shard_worker"
PLACE = f"{LABEL}stage-uri"
"""Annotation: the directory of the stage that a Job collects for."""


@dataclass(frozen=True)
class StageJob(ABC):
    """A program of a stage as a Job: what to create, and how long to wait for what."""

    identity: StageIdentity
    infra: KubernetesInfra
    store: str = field(kw_only=True)
    """URI of the store's root."""
    keys: ClassVar[PodKeys]
    container: ClassVar[str]
    """Name of the container, and of the component."""

    @property
    @abstractmethod
    def settings(self) -> TrainerPods | CollectorPods:
        """Of the pods."""

    @property
    def namespace(self) -> str:
        return self.infra.namespace

    @property
    def pods(self) -> int:
        return 1

    @abstractmethod
    def seconds(self) -> int:
        """The Job's deadline."""

    def run_object(self) -> Manifest:
        return stage_pod.run_object(self.identity, self.namespace, self.store)

    def run_service(self, owner: Manifest) -> Manifest | None:
        """The headless Service that gives pods host names; None where there is one pod."""
        return None

    def job(self, number: int, owner: Manifest) -> Manifest:
        """The Job of a try."""
        spec = {
            "completions": self.pods,
            "parallelism": self.pods,
            "completionMode": "Indexed",
            "backoffLimit": self._restarts(),
            "activeDeadlineSeconds": self.seconds(),
            "ttlSecondsAfterFinished": self.infra.keep_jobs_seconds,
            "podFailurePolicy": stage_pod.pod_failure_policy(self.container, self._disrupted()),
        }
        pod, queue = self._pod(number), self.infra.queue
        if queue:
            spec["suspend"] = True  # until Kueue admits it
        labels = self.identity.labels() | component_labels(self.container)
        of_pod: Manifest = {"labels": labels}
        declared = [port for container in pod["containers"] for port in container.get("ports", [])]
        if pages := [port["containerPort"] for port in declared if port["name"] == stage_pod.METRICS]:
            of_pod["annotations"] = {"prometheus.io/scrape": "true", "prometheus.io/port": str(pages[0])}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": self.identity.job_name(number),
                "namespace": self.namespace,
                "labels": labels | ({"kueue.x-k8s.io/queue-name": queue} if queue else {}),
                "annotations": self.identity.annotations() | self._annotations(),
                "ownerReferences": [stage_pod.owner_reference(owner)],
            },
            "spec": spec | {"template": {"metadata": of_pod, "spec": pod}},
        }

    @abstractmethod
    def command(self, number: int) -> list[str]:
        """Arguments of the interpreter in each pod."""

    @abstractmethod
    def _pod(self, number: int) -> Manifest: ...

    def _restarts(self) -> int:
        """Of a pod, by the Job itself."""
        return 0

    def _disrupted(self) -> Literal["Ignore", "FailJob"]:
        """What becomes of the Job when its pod is evicted."""
        return "FailJob"

    def _annotations(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class TrainJob(StageJob):
    """A training step."""

    service: ProcessService
    reports: str
    """URI of the directory below which each try has one of its own: `<reports>/<name>/spec.json`, `report.json`, …"""
    keys = TRAINER
    container = "trainer"

    @property
    def settings(self) -> TrainerPods:
        return self.infra.trainer

    @property
    def pods(self) -> int:
        return self.infra.trainer.pods

    def report(self, number: int) -> str:
        """Where a try leaves its result."""
        return f"{self.reports}/{self.identity.job_name(number)}"

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

    def seconds(self) -> int:
        """The Job's deadline: the wait for nodes, and the step."""
        return int(self.infra.trainer.pending_seconds + self.service.timeout_seconds)

    def _pod(self, number: int) -> Manifest:
        infra, trainer = self.infra, self.infra.trainer
        claim = trainer.cache_claim
        cache = [{"name": "cache", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
        cache_mount = [{"name": "cache", "mountPath": NODE_CACHE}] if claim else []
        container = stage_pod.container(
            self.container,
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

    def _restarts(self) -> int:
        return self.infra.trainer.restarts if self.pods == 1 else 0

    def _disrupted(self) -> Literal["Ignore", "FailJob"]:
        """A disrupted pod is replaced; its peers in a group of several have failed with it."""
        return "Ignore" if self.pods == 1 else "FailJob"

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


@dataclass(frozen=True)
class ShardJob(StageJob):
    """A shard of a collection."""

    distribution: Shards
    spec: str
    """URI of its spec.json."""
    stage: str
    """URI of the stage's directory."""
    keys = COLLECTOR
    container = "collector"

    @property
    def settings(self) -> CollectorPods:
        assert self.infra.collector is not None, "refused at load (config.checks)"
        return self.infra.collector

    def seconds(self) -> int:
        """The Job's deadline: the wait for a node counts."""
        return int(self.distribution.timeout_seconds)

    def command(self, number: int) -> list[str]:
        return ["-m", WORKER, "--spec", self.spec]

    def _pod(self, number: int) -> Manifest:
        infra, settings = self.infra, self.settings
        container = stage_pod.container(
            self.container,
            settings.image,
            settings,
            self.identity,
            self.command(number),
            infra.environment | settings.environment,
            store=self.store,
            store_claim=infra.store_claim,
            secret=settings.secret,
        )
        return stage_pod.pod(settings, container, settings.service_account, [], infra.store_claim)

    def _annotations(self) -> dict[str, str]:
        return {PLACE: self.stage}
