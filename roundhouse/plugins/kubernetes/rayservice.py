"""The engine as a RayService: the desired state is written to its `serveConfigV2`, and KubeRay passes it to Serve.

Invariant: a refit changes only the policy's `user_config` in the RayService, so no pod is replaced and no cluster is
made. `ensure` returns only after KubeRay reports that the application runs, and every replica has confirmed the wanted
version; a replica that starts later reads the same text.

    get ──> owner? ──> apply serveConfigV2 ──> watch: KubeRay's report ──┐
                                 ^      409: another write was first    ask: replicas' own reports ──> all present
                                 └─────────────┘                             └──> failed, refused, no operator: the error

A RayService serves one run. It is annotated with the run's name, and another run is refused until that one has
finished, because versions are plain numbers. Without `infra.engine.ray_service` the run makes its own RayService, which
the run's ConfigMap owns. `release` removes the replicas, and the autoscaler the nodes.

KubeRay ignores a changed template of a living cluster (`upgradeStrategy: None`: no GPUs for two clusters). A write to
the RayService therefore first checks for a cluster of another template, and deletes it:
KubeRay makes a new one. The digest of the checked template is an annotation, so each template replaces a cluster at
most once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from roundhouse.activity import announce
from roundhouse.config.kubernetes import KubernetesInfra, RayServiceEngine
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError, DeploymentFailed, InfraError, StoreError
from roundhouse.generation import deployment
from roundhouse.generation.silence import SilenceWatch, SilentReplica
from roundhouse.plugins.kubernetes import stage_pod
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster, OwnedResources, connect, explained
from roundhouse.plugins.kubernetes.names import LABEL, StageIdentity, engine_name, label_value, run_labels
from roundhouse.plugins.kubernetes.ray_template import differences, template_digest
from roundhouse.plugins.kubernetes.serve_config import (
    Told,
    application_in,
    as_handed_on,
    exact_request,
    told,
    with_application,
)
from roundhouse.plugins.kubernetes.watching import Watched
from roundhouse.retry import Backoff
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from roundhouse.weight_sync.replica_state import (
    RefitOptions,
    ReplicaReport,
    application_digest,
    arguments_of,
    desired_state,
)

logger = logging.getLogger(__name__)

Object = dict[str, Any]

API = "ray.io/v1"
FIELD_MANAGER = "roundhouse"
ASK_AGAIN = Backoff(0.1, longest=1.0, factor=1.5)
"""Between two questions to the replicas."""
STALE_SECONDS = 8.0
"""KubeRay reads Serve's status before it hands on a change, so a failure that was there before counts only when it stays."""
MOST_WRITERS = 5
TEMPLATE = f"{LABEL}engine-template"
"""Annotation: digest of the template that the cluster was compared with."""


@dataclass(frozen=True)
class ServedRun:
    """The run that a RayService serves."""

    run_id: str
    run_uid: str
    location: str
    """URI of the run in its store."""

    def notes(self) -> dict[str, str]:
        return {f"{LABEL}run": self.run_id, f"{LABEL}run-uid": self.run_uid, f"{LABEL}location": self.location}

    def run_object(self, namespace: str) -> Object:
        """Return the run's ConfigMap, as its Jobs have it."""
        identity = StageIdentity(self.run_id, self.run_uid, 0, "engine", "")
        return stage_pod.run_object(identity, namespace, self.location.rpartition("/runs/")[0])


@dataclass(frozen=True)
class RayServiceServed(deployment.EngineService):
    """The engine of a run, run by KubeRay."""

    infra: KubernetesInfra
    engine: RayServiceEngine
    holder: ServedRun
    calls: Counter[str] = field(default_factory=Counter, compare=False)
    """Calls of the API server, by verb and kind, since this object was made."""
    replaced: list[str] = field(default_factory=list, compare=False)
    """Names of the Ray clusters that were deleted because their template had changed."""

    @property
    def name(self) -> str:
        """The RayService's name."""
        return self.engine.ray_service or engine_name(self.holder.run_id, self.holder.run_uid)

    @property
    def url(self) -> str:
        inside = f"http://{self.name}-serve-svc.{self.infra.namespace}.svc:8000"
        return (self.engine.url or inside).rstrip("/")

    def application(self, config: GenerationConfig, model_dir: str) -> str:
        return application_digest(as_handed_on(arguments_of(deployment.engine_arguments(config), model_dir, None)))

    def start(self, config: GenerationConfig, model_dir: str) -> None:
        with self._connected() as cluster:
            self._write_desired(cluster, config, model_dir, None, 0)

    def ensure(
        self,
        config: GenerationConfig,
        model_dir: str,
        weights: str,
        version: int,
        options: RefitOptions = RefitOptions(),
    ) -> list[ReplicaReport]:
        with self._connected() as cluster:
            written, application = self._write_desired(cluster, config, model_dir, weights, version, options)
            patience = config.start_timeout_seconds + config.refit_timeout_seconds
            waiting = _RefitWait(self, cluster, application, int(written["metadata"]["generation"]), patience)
            return waiting.until_all_are_there()

    def release(self, *, next_pod_resumes: bool = False) -> None:
        with self._connected() as cluster:
            if next_pod_resumes and self._has_next_pod(cluster):
                return
            if self.engine.ray_service is None:
                try:
                    cluster.delete(f"{self.collection}/{self.name}", propagation="Background")
                except ApiRefused as refused:
                    raise explained(refused, f"delete RayService {self.name}") from refused
                return
            for _ in range(MOST_WRITERS):
                service = self._get(cluster)
                notes, text = service["metadata"].get("annotations") or {}, service["spec"].get("serveConfigV2")
                if notes.get(f"{LABEL}run-uid") != self.holder.run_uid or application_in(text) is None:
                    return
                if self._apply(cluster, service, with_application(text, None)) is not None:
                    return
            raise self._too_many_writers()

    def metrics(self) -> dict[str, float]:
        return {"kubernetes_calls": float(self.calls.total()), "engine_replacements": float(len(self.replaced))}

    def _has_next_pod(self, cluster: Cluster) -> bool:
        """Return whether another pod follows this process's pod: its Job exists and is not being deleted."""
        try:
            owner = OwnedResources(cluster, self.infra.namespace).flow()
            if owner is None or owner["kind"] != "Job":
                return False
            name = owner["metadata"]["name"]
            job = cluster.get(f"/apis/batch/v1/namespaces/{self.infra.namespace}/jobs/{name}")
        except ApiRefused:
            return False
        return not job["metadata"].get("deletionTimestamp")

    @contextmanager
    def _connected(self) -> Iterator[Cluster]:
        cluster = connect(self.infra)
        try:
            yield cluster
        finally:
            self.calls.update(cluster.calls)
            cluster.close()

    @property
    def collection(self) -> str:
        return f"/apis/{API}/namespaces/{self.infra.namespace}/rayservices"

    def _write_desired(
        self,
        cluster: Cluster,
        config: GenerationConfig,
        model_dir: str,
        weights: str | None,
        version: int,
        options: RefitOptions = RefitOptions(),
    ) -> tuple[Object, Object]:
        """Write the desired state and return the RayService with its application."""
        replicas = self.replicas()
        for _ in range(MOST_WRITERS):
            service = self._get(cluster)
            self._refuse_other_run(service)
            self._replace_changed_cluster(cluster, service)
            text = service["spec"].get("serveConfigV2")
            current = application_in(text)
            before = None if current is None else current["deployments"][0].get("user_config")
            desired = desired_state(version, weights, options, [before, *(replica.desired for replica in replicas)])
            desired["request"] = exact_request(desired["request"])
            if weights is None and before is not None:
                desired = before  # engines that have weights keep them
            application = dict(as_handed_on(deployment.wanted_application(config, model_dir, desired)))
            written = self._apply(cluster, service, with_application(text, application))
            if written is not None:
                return written, application
        raise self._too_many_writers()

    def _too_many_writers(self) -> InfraError:
        return InfraError(
            f"RayService {self.name} was changed by others {MOST_WRITERS} times while the flow wrote to it."
        )

    def _refuse_other_run(self, service: Object) -> None:
        notes = service["metadata"].get("annotations") or {}
        uid, run, place = (notes.get(f"{LABEL}{name}") for name in ("run-uid", "run", "location"))
        if uid not in (None, "", self.holder.run_uid) and not _is_over(place):
            raise ConfigError(
                f"RayService {self.name} serves run {run!r} ({place}), which has not finished. Name another one for this "
                f"run (infra.engine.ray_service). If that run is abandoned: kubectl -n {self.infra.namespace} annotate "
                f"rayservice {self.name} {LABEL}run-uid-"
            )

    def _get(self, cluster: Cluster) -> Object:
        """Return the RayService; the run's own is created if it does not exist."""
        namespace = self.infra.namespace
        try:
            return cluster.get(f"{self.collection}/{self.name}")
        except ApiRefused as refused:
            if refused.status != 404:
                raise explained(refused, f"get RayService {self.name} in namespace {namespace}") from refused
            if self.engine.ray_service is None:
                return self._create(cluster)
            raise ConfigError(
                f"RayService {self.name} does not exist in namespace {namespace} (infra.engine.ray_service): "
                f"{refused.message}. Apply k8s/overlays/gpu. If the kind is unknown, install the chart kuberay-operator."
            ) from refused

    def _create(self, cluster: Cluster) -> Object:
        service = rayservice_in(self.engine.manifest or "")
        owned, namespace = OwnedResources(cluster, self.infra.namespace), self.infra.namespace
        owner = owned.ensure("v1", "configmaps", self.holder.run_object(namespace))
        labels = (service["metadata"].get("labels") or {}) | run_labels(self.holder.run_id, self.holder.run_uid)
        metadata = {
            "name": self.name,
            "namespace": namespace,
            "labels": labels,
            "annotations": service["metadata"].get("annotations") or {},
            "ownerReferences": [stage_pod.owner_reference(owner)],
        }
        return owned.ensure(API, "rayservices", service | {"metadata": metadata})

    def _replace_changed_cluster(self, cluster: Cluster, service: Object) -> None:
        """Delete the RayService's cluster if it was made of another template, and wait until its pods are gone.

        Raises:
            InfraError: they are not gone within `infra.engine.operator_seconds`.
        """
        template = service["spec"]["rayClusterConfig"]
        notes, status = service["metadata"].get("annotations") or {}, service.get("status") or {}
        if notes.get(TEMPLATE) == template_digest(template):
            return
        for part in ("activeServiceStatus", "pendingServiceStatus"):
            name = (status.get(part) or {}).get("rayClusterName")
            current = self._ray_cluster(cluster, name) if name else None
            changes = [] if current is None else differences(template, current["spec"])
            if not name or current is None or not changes:
                continue
            text = f"the template of RayService {self.name} has changed ({'; '.join(changes)}): replacing {name}"
            logger.warning("%s", text)
            announce("engine", text=text)
            self._delete_cluster(cluster, current)
            self.replaced.append(name)

    def _ray_cluster(self, cluster: Cluster, name: str) -> Object | None:
        try:
            return cluster.get(f"{self._clusters}/{name}")
        except ApiRefused as refused:
            if refused.status != 404:
                raise explained(refused, f"get RayCluster {name} in namespace {self.infra.namespace}") from refused
            return None

    def _delete_cluster(self, cluster: Cluster, ray_cluster: Object) -> None:
        name, uid = ray_cluster["metadata"]["name"], ray_cluster["metadata"]["uid"]
        try:
            cluster.delete(f"{self._clusters}/{name}", uid=uid)
        except ApiRefused as refused:
            raise explained(refused, f"delete RayCluster {name} in namespace {self.infra.namespace}") from refused
        # Foreground: it stays until its pods are gone. Replicas that end must not answer for the next cluster's
        deadline = time.monotonic() + self.engine.operator_seconds
        for attempt in range(1, 10_000):
            current = self._ray_cluster(cluster, name)
            if current is None or current["metadata"]["uid"] != uid:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(ASK_AGAIN.pause(attempt))
        raise InfraError(
            f"RayCluster {name} was deleted, and still has pods after {self.engine.operator_seconds:g} s "
            f"(infra.engine.operator_seconds): kubectl -n {self.infra.namespace} get pods -l ray.io/cluster={name}"
        )

    @property
    def _clusters(self) -> str:
        return f"/apis/{API}/namespaces/{self.infra.namespace}/rayclusters"

    def _apply(self, cluster: Cluster, service: Object, text: str) -> Object | None:
        """Write `serveConfigV2` and the run's notes; return None if the RayService was changed since it was read."""
        notes = self.holder.notes() | {TEMPLATE: template_digest(service["spec"]["rayClusterConfig"])}
        metadata = {
            "name": self.name,
            "namespace": self.infra.namespace,
            "resourceVersion": service["metadata"]["resourceVersion"],
            "annotations": notes,
            "labels": {f"{LABEL}run": label_value(self.holder.run_id)},
        }
        body = {"apiVersion": API, "kind": "RayService", "metadata": metadata, "spec": {"serveConfigV2": text}}
        try:
            return cluster.apply(f"{self.collection}/{self.name}", body, FIELD_MANAGER)
        except ApiRefused as refused:
            if refused.status != 409:
                raise explained(refused, f"patch RayService {self.name}") from refused
            return None


def served_engine(run: Run) -> RayServiceServed:
    """Return the engine of a run with `infra.engine`."""
    infra = run.config.infra.cluster
    assert infra is not None, "its section names this function"
    assert infra.engine is not None
    return RayServiceServed(infra, infra.engine, ServedRun(run.run_id, run.uid, run.location.uri))


def rayservice_in(manifest: str) -> Object:
    """Return the RayService in a file of manifests (`infra.engine.manifest`).

    Raises:
        ConfigError: the file cannot be read, or does not have exactly one.
    """
    try:
        items = [item for item in yaml.safe_load_all(Path(manifest).read_text()) if isinstance(item, dict)]
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"infra.engine.manifest: {manifest} cannot be read: {error}") from error
    services = [item for item in items if item.get("kind") == "RayService" and item.get("metadata")]
    if len(services) != 1:
        raise ConfigError(
            f"infra.engine.manifest: {manifest} has {len(services)} RayServices, not one. Start from "
            "k8s/overlays/gpu/rayservice.yaml."
        )
    return services[0]


@dataclass
class _RefitWait:
    """From writing the desired state until all replicas report it."""

    served: RayServiceServed
    cluster: Cluster
    application: Object
    generation: int
    seconds: float
    began: float = field(default_factory=time.monotonic)
    changed_since: bool = False
    """Whether KubeRay has reported another status than at the start."""

    def until_all_are_there(self) -> list[ReplicaReport]:
        import threading

        changed, name = threading.Event(), self.served.name
        watched = Watched(
            self.cluster, self.served.collection, "", lambda _: changed.set(), fields=f"metadata.name={name}"
        )
        reports, first, polls = [], None, 0
        watch, started, silent = SilenceWatch(), dict[str, str](), list[SilentReplica]()
        try:
            while time.monotonic() - self.began < self.seconds:
                polls += 1
                changed.clear()
                if watched.failure is not None:
                    raise watched.failure
                watched.listed.wait(self.cluster.patience_seconds)
                services = watched.all_present()
                if watched.failure is None and not services:
                    raise InfraError(f"RayService {name} was deleted while the flow waited for it.")
                word = told(services[0] if services else {})
                first = first or word
                self.changed_since |= (word.status, word.message) != (first.status, first.message)
                reports = self.served.replicas()
                digest = application_digest(self.application["args"])
                if word.is_running and deployment.all_there(reports, self._count, digest, self._desired):
                    return reports
                self._raise_failures(word)
                started |= {each.replica_id: f"process {each.pid}" for each in reports if each.application == digest}
                watch.hear(each.replica_id for each in reports)
                silent = watch.silent(started)
                if watch.is_report_due(silent):
                    announce("engine", text=f"waiting: {'; '.join(map(str, silent))}")
                changed.wait(ASK_AGAIN.pause(polls))
        finally:
            watched.stop()
        raise DeploymentFailed(
            f"Not all {self._count} replicas of RayService {name} answered with version {self._desired['policy_version']} "
            f"within {self.seconds:g} s (generation.start_timeout_seconds + refit_timeout_seconds). KubeRay: {word.status} "
            f"{word.message}. Silent: {'; '.join(map(str, silent)) or 'no replica that answered'}. Answers: "
            f"{[f'{r.replica_id}: version {r.policy_version}, {r.error}' for r in reports]}. {self._events()}"
        )

    @property
    def _count(self) -> int:
        return int(self.application["deployments"][0]["num_replicas"])

    @property
    def _desired(self) -> Object:
        return dict(self.application["deployments"][0]["user_config"])

    def _raise_failures(self, word: Told) -> None:
        waited = time.monotonic() - self.began
        name = self.served.name
        if word.generation < self.generation:
            if waited > self.served.engine.operator_seconds:
                raise InfraError(
                    f"KubeRay has not looked at RayService {name} for {waited:.0f} s. Does its operator run, and does it "
                    f"reach port 8265 of the head (NetworkPolicy)? {self._events()}"
                )
            return
        if word.failure is not None and (self.changed_since or waited > STALE_SECONDS):
            raise DeploymentFailed(f"The policy on RayService {name} failed. {word.failure}")

    def _events(self) -> str:
        """Return the cluster's events about the RayService; empty if none exist or they are not readable."""
        namespace, name = self.served.infra.namespace, self.served.name
        selector = f"involvedObject.kind=RayService,involvedObject.name={name},type=Warning"
        try:
            events = self.cluster.get(f"/api/v1/namespaces/{namespace}/events", fieldSelector=selector).get("items")
        except (ApiRefused, InfraError):
            return ""
        return f"Event of the cluster: {events[-1].get('message')}" if events else ""


def _is_over(place: str | None) -> bool:
    """Return whether the run at this place has finished, or was deleted."""
    if place is None:
        return False
    try:
        location = Location(place)
        return location.exists("summary.json") or not location.exists("run.json")
    except (StoreError, ValueError, OSError):
        return False
