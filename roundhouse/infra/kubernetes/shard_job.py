"""The manifests of a shard of a collection: pure, from the configuration.

Invariant: equal arguments give equal manifests, restricted as those of all stages (`stage_pod`). A pod of its own that failed,
for whatever reason, ends the Job: whoever waits for it counts the loss and decides about another try, which goes on with what
this one has written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roundhouse.config.kubernetes import CollectorPods, KubernetesInfra
from roundhouse.config.rollout import Shards
from roundhouse.infra.kubernetes import stage_pod
from roundhouse.infra.kubernetes.names import LABEL, StageIdentity, component_labels
from roundhouse.infra.kubernetes.stage_pod import COLLECTOR, PodKeys

Manifest = dict[str, Any]

CONTAINER = "collector"
WORKER = "roundhouse.collection.shard_worker"
PLACE = f"{LABEL}stage-uri"
"""Annotation: the directory of the stage that a Job collects for."""


@dataclass(frozen=True)
class ShardJob:
    """A shard as a Job of one pod."""

    identity: StageIdentity
    infra: KubernetesInfra
    distribution: Shards
    spec: str
    """URI of its spec.json."""
    stage: str
    """URI of the stage's directory."""
    store: str
    """URI of the store's root."""

    @property
    def namespace(self) -> str:
        return self.infra.namespace

    @property
    def keys(self) -> PodKeys:
        return COLLECTOR

    @property
    def settings(self) -> CollectorPods:
        assert self.infra.collector is not None, "refused at load (config.checks)"
        return self.infra.collector

    def seconds(self) -> int:
        """The Job's deadline: the wait for a node counts."""
        return int(self.distribution.timeout_seconds)

    def run_object(self) -> Manifest:
        return stage_pod.run_object(self.identity, self.namespace, self.store)

    def run_service(self, owner: Manifest) -> None:
        """Shards do not know of each other."""

    def job(self, number: int, owner: Manifest) -> Manifest:
        """The Job of a try."""
        infra, settings = self.infra, self.settings
        container = stage_pod.container(
            CONTAINER,
            settings.image,
            settings,
            self.identity,
            self.command(number),
            infra.environment | settings.environment,
            store=self.store,
            store_claim=infra.store_claim,
            secret=settings.secret,
        )
        pod = stage_pod.pod(settings, container, settings.service_account, [], infra.store_claim)
        spec = {
            "completions": 1,
            "parallelism": 1,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "activeDeadlineSeconds": self.seconds(),
            "ttlSecondsAfterFinished": infra.keep_jobs_seconds,
            "podFailurePolicy": stage_pod.pod_failure_policy(CONTAINER, "FailJob"),
        }
        labels = self.identity.labels() | component_labels("collector")
        return stage_pod.job(
            self.identity, number, self.namespace, owner, spec, pod, labels, infra.queue, {PLACE: self.stage}
        )

    def command(self, number: int) -> list[str]:
        """Arguments of the interpreter."""
        return ["-m", WORKER, "--spec", self.spec]
