"""The manifests of a training step, of a shard of a collection and of a gym server: pure, from the configuration.

Invariant: equal arguments give equal manifests, with the restrictions of all stages (`stage_pod`).

One pod runs a step itself, or torchrun over its own processes. Several pods are an Indexed Job: index 0 is the meeting
point, which the others find by its host name under the run's headless Service. Resident ranks are the same pods, which
stay.

A shard is one pod. Its failure ends the Job: the launcher's caller counts the loss and decides about another try,
which resumes from stored rollouts. A gym server is one pod too; after its end, another Job follows under the same
Service.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from roundhouse.config.kubernetes import (
    TRAINER_IMAGE,
    CollectorPods,
    GymPods,
    KubernetesInfra,
    OwnPods,
    Pods,
    TrainerPods,
)
from roundhouse.config.rollout import Shards
from roundhouse.config.training import ProcessService, ResidentService
from roundhouse.plugins.kubernetes import stage_pod
from roundhouse.plugins.kubernetes.names import LABEL, StageIdentity, component_labels, run_labels, run_object_name
from roundhouse.plugins.kubernetes.stage_pod import COLLECTOR, GYM, TRAINER, PodKeys
from roundhouse.store.location import Location
from roundhouse.training.service.job_entry import ADDRESS_VARIABLE, RANKS_MEET_BY_FILE, torchrun, torchrun_of_machine

Manifest = dict[str, Any]

STEP = "roundhouse.training.service.one_shot"
CACHE = f"{stage_pod.SCRATCH}/cache"
NODE_CACHE = "/cache"
"""Mount path of `infra.trainer.cache_claim`."""
MEETING_PORT = 29500
WORKER = "roundhouse.collection.shard_worker"
PLACE = f"{LABEL}stage-uri"
"""Annotation: the directory of the stage that a Job collects for; `gym` of a gym server, `ranks` of resident ranks."""
GYM_PLACE, RANKS_PLACE = "gym", "ranks"
HTTP = "http"
"""Name of a server's port, as in `k8s/base/gym.yaml` and its network policies."""
SERVER_SECONDS = 7 * 86_400
"""Deadline of gym servers and resident ranks, if a killed flow leaves them. A longer run starts them again."""


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
    def settings(self) -> Pods:
        """Return the settings of the pods."""

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
        """Return the headless Service that gives pods host names; None for a single pod."""
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
        labels, queueing = self._labels(), {"queue-name": queue, "priority-class": self.infra.queue_priority}
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
                "labels": labels | {f"kueue.x-k8s.io/{name}": value for name, value in queueing.items() if value},
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

    def _store_volume(self) -> tuple[list[Manifest], list[Manifest]]:
        claim = self.infra.store_claim
        return stage_pod.claimed("store", claim, str(Location(self.store).local_path) if claim else "")

    def _own_container(
        self, settings: OwnPods, number: int, variables: Mapping[str, str], mounts: Sequence[Manifest] = ()
    ) -> Manifest:
        environment = {**self.infra.environment, **settings.environment, **variables}
        command, secret = self.command(number), settings.secret
        return stage_pod.container(
            self.container, settings.image, settings, self.identity, command, environment, secret, mounts=mounts
        )

    def _labels(self) -> dict[str, str]:
        return dict(self.identity.extra) | self.identity.labels() | component_labels(self.container)

    def _restarts(self) -> int:
        """Return the number of restarts of a pod by the Job itself."""
        return 0

    def _disrupted(self) -> Literal["Ignore", "FailJob"]:
        """Return the Job's reaction to an evicted pod."""
        return "FailJob"

    def _annotations(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class TrainJob(StageJob):
    """A training step, or resident ranks."""

    service: ProcessService | ResidentService
    reports: str
    """URI of the directory in which each try has a subdirectory: `<reports>/<name>/spec.json`, `report.json`, …"""
    module: str = STEP
    """Module that the processes run."""
    stays: bool = False
    """Whether it serves until it or its owner is deleted."""
    flow: Manifest | None = None
    """Owner of a serving one, as in `GymJob`."""
    keys = TRAINER
    container = "trainer"

    @property
    def settings(self) -> TrainerPods:
        return self.infra.trainer

    @property
    def pods(self) -> int:
        return self.infra.trainer.pods

    def report(self, number: int) -> str:
        """Return the place of a try's result."""
        return f"{self.reports}/{self.identity.job_name(number)}"

    def run_service(self, owner: Manifest) -> Manifest | None:
        """Return the headless Service that gives pods host names; None for a single pod."""
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
        if self.stays:
            return SERVER_SECONDS
        return int(self.infra.trainer.pending_seconds + self.service.timeout_seconds)

    def _pod(self, number: int) -> Manifest:
        infra, trainer = self.infra, self.infra.trainer
        cache, cache_mount = stage_pod.claimed("cache", None if self.stays else trainer.cache_claim, NODE_CACHE)
        store, store_mount = self._store_volume()
        container = stage_pod.container(
            self.container,
            trainer.image or f"{TRAINER_IMAGE}-{'cuda' if trainer.gpus else 'cpu'}",
            trainer,
            self.identity,
            self.command(number),
            (RANKS_MEET_BY_FILE if self.pods == 1 else {}) | infra.environment,
            infra.secret,
            mounts=[{"name": "memory", "mountPath": "/dev/shm"}, *cache_mount, *store_mount],
            devices={"nvidia.com/gpu": str(trainer.gpus)} if trainer.gpus else {},
        )
        own = {"name": ADDRESS_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        container["env"] += [own] if self.stays else []
        memory = {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": trainer.shared_memory}}
        pod = stage_pod.pod(trainer, container, infra.service_account, [memory, *cache, *store])
        if self.pods > 1:
            pod["subdomain"] = run_object_name(self.identity.run_id, self.identity.run_uid)
        return pod

    def _restarts(self) -> int:
        return self.infra.trainer.restarts if self.pods == 1 and not self.stays else 0

    def _disrupted(self) -> Literal["Ignore", "FailJob"]:
        """Return the reaction to a disruption: the pod is replaced; in a group of several, its peers have failed with
        it, and its data is lost."""
        return "Ignore" if self.pods == 1 and not self.stays else "FailJob"

    def _annotations(self) -> dict[str, str]:
        return {PLACE: RANKS_PLACE} if self.stays else {}

    def job(self, number: int, owner: Manifest) -> Manifest:
        return super().job(number, self.flow or owner)

    def command(self, number: int) -> list[str]:
        """Arguments of the interpreter in each pod."""
        step = ["-m", self.module, "--spec", f"{self.report(number)}/spec.json"]
        processes = self.service.processes
        if self.pods == 1:
            return [*(torchrun(processes, f"{stage_pod.SCRATCH}/meeting") if processes > 1 else []), *step]
        host = f"{self.identity.job_name(number)}-0.{run_object_name(self.identity.run_id, self.identity.run_uid)}"
        address = f"{host}.{self.namespace}.svc"
        return [*torchrun_of_machine("$(JOB_COMPLETION_INDEX)", self.pods, processes, address, MEETING_PORT), *step]


@dataclass(frozen=True)
class ShardJob(StageJob):
    """A shard of a collection."""

    distribution: Shards
    spec: str
    """URI of its spec.json."""
    stage: str
    """URI of the stage's directory."""
    variables: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """In addition to those of the configuration."""
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
        store, mounts = self._store_volume()
        container = self._own_container(self.settings, number, self.variables, mounts)
        return stage_pod.pod(self.settings, container, self.settings.service_account, store)

    def _annotations(self) -> dict[str, str]:
        return {PLACE: self.stage}


@dataclass(frozen=True)
class GymJob(StageJob):
    """A server of a run's own NeMo Gym, or its head server; `identity.shard` is its name. It is called at the address of its
    Service, which a later Job of the same server takes over."""

    service_name: str
    port: int
    """Port of the server and its Service."""
    role: str
    """Its type, by which network policies select it."""
    arguments: tuple[str, ...]
    """The program and its arguments."""
    variables: Mapping[str, str]
    secret_variables: Mapping[str, tuple[str, str]]
    """Secret and key of each variable that is one."""
    directory: str | None = None
    """Working directory of the program. None: the image's."""
    flow: Manifest | None = None
    """Object that ends with the flow, and owns these pods (`OwnedResources.flow`). None: the run's ConfigMap owns
    them."""
    keys = GYM
    container = "gym"

    @property
    def settings(self) -> GymPods:
        return self.infra.gym

    @property
    def host(self) -> str:
        return f"{self.service_name}.{self.namespace}.svc"

    def seconds(self) -> int:
        return SERVER_SECONDS

    def command(self, number: int) -> list[str]:
        return list(self.arguments[1:])

    def job(self, number: int, owner: Manifest) -> Manifest:
        return super().job(number, self.flow or owner)

    def service(self, owner: Manifest) -> Manifest:
        """Return the Service that gives the server its address, independent of its pod."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": self.service_name,
                "namespace": self.namespace,
                "labels": self._labels(),
                "annotations": self.identity.annotations(),
                "ownerReferences": [stage_pod.owner_reference(self.flow or owner)],
            },
            "spec": {
                "selector": self.identity.labels(),
                "ports": [{"name": HTTP, "port": self.port, "targetPort": HTTP, "protocol": "TCP"}],
            },
        }

    def _labels(self) -> dict[str, str]:
        return super()._labels() | {f"{LABEL}gym-server": self.role}

    def _pod(self, number: int) -> Manifest:
        """Without the store: a server runs code of others, and calls none."""
        container = self._own_container(self.settings, number, self.variables)
        container["command"] = [self.arguments[0]]
        if self.directory is not None:
            container["workingDir"] = self.directory
        container["env"] += [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, (secret, key) in sorted(self.secret_variables.items())
        ]
        container["ports"] = [{"name": HTTP, "containerPort": self.port}, *container.get("ports", [])]
        container["readinessProbe"] = {"tcpSocket": {"port": HTTP}, "periodSeconds": 2}
        # The node of an engine, else its zone: preferred, so that a full node keeps no server waiting.
        labels = {"app.kubernetes.io/component": "engine"}
        if self.infra.engine is not None:
            labels["ray.io/node-type"] = "worker"  # the head of the Ray cluster does not run a replica
        preferred = [
            {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": {"matchLabels": labels}}}
            for key, weight in {"kubernetes.io/hostname": 60, "topology.kubernetes.io/zone": 90}.items()
        ]
        near = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        return stage_pod.pod(self.settings, container, self.settings.service_account) | {"affinity": near}

    def _disrupted(self) -> Literal["Ignore", "FailJob"]:
        """A disrupted pod is replaced, and does not count as a restart."""
        return "Ignore"

    def _annotations(self) -> dict[str, str]:
        return {PLACE: GYM_PLACE}


def gym_secret(name: str, job: GymJob, owner: Manifest, values: Mapping[str, str]) -> Manifest:
    """Return the Secret with the configuration of each server, by `identity.shard`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": run_labels(job.identity.run_id, job.identity.run_uid),
            "annotations": job.identity.annotations(),
            "ownerReferences": [stage_pod.owner_reference(job.flow or owner)],
        },
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in values.items()},
    }
