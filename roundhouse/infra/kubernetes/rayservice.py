"""The engine as a RayService: what is wanted of it is written to its `serveConfigV2`, and KubeRay hands it to Serve.

Invariant: a refit changes the policy's `user_config` and nothing else of the RayService, so no pod is replaced and no cluster
is made. `ensure` returns only when KubeRay says that the application runs, and every replica has said itself that it answers
with the wanted version; what a replica that starts later wants is the same text.

    get ──> whose is it? ──> apply serveConfigV2 ──> watch: KubeRay's word ──┐
                                 ^      409: somebody was quicker      ask: replicas' own word ──> all there
                                 └─────────────┘                             └──> failed, refused, no operator: the error

A RayService serves one run. It is annotated with the run's name, and another run is refused until that one has finished:
versions are numbers, and a number of another run would be taken for the own.

In `serveConfigV2`, only the policy's application is ours; everything else in the text stays. What is written is equal to
what Serve receives: KubeRay reads the text into Go's values and writes it again, in which every number is a float64, so

    300.0 arrives as 300      1763760000123456789 arrives as 1763760000123456800
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from roundhouse.config.kubernetes import KubernetesInfra, RayServiceEngine
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import ConfigError, DeploymentFailed, InfraError, StoreError
from roundhouse.generation import deployment
from roundhouse.generation.deployment import last_lines
from roundhouse.generation.serve_app import APPLICATION
from roundhouse.infra.kubernetes.cluster import ApiRefused, Cluster, connect, explained
from roundhouse.infra.kubernetes.names import LABEL, label_value
from roundhouse.infra.kubernetes.watching import Watched
from roundhouse.retry import Backoff
from roundhouse.store.location import Location
from roundhouse.weight_sync.replica_state import (
    RefitOptions,
    ReplicaReport,
    application_digest,
    arguments_of,
    desired_state,
)

Object = dict[str, Any]

API = "ray.io/v1"
FIELD_MANAGER = "roundhouse"
ASK_AGAIN = Backoff(0.1, longest=1.0, factor=1.5)
"""Between two questions to the replicas."""
STALE_SECONDS = 8.0
"""KubeRay reads Serve's status before it hands on a change, so a failure that was there before counts only when it stays."""
MOST_WRITERS = 5


@dataclass(frozen=True)
class ServedRun:
    """The run that a RayService serves."""

    run_id: str
    run_uid: str
    location: str
    """URI of the run in its store."""

    def notes(self) -> dict[str, str]:
        return {f"{LABEL}run": self.run_id, f"{LABEL}run-uid": self.run_uid, f"{LABEL}location": self.location}


@dataclass(frozen=True)
class RayServiceServed(deployment.EngineService):
    """The engine of a run, run by KubeRay."""

    infra: KubernetesInfra
    engine: RayServiceEngine
    holder: ServedRun
    calls: Counter[str] = field(default_factory=Counter, compare=False)
    """Of the API server, by verb and kind, since this object was made."""

    @property
    def url(self) -> str:
        inside = f"http://{self.engine.ray_service}-serve-svc.{self.infra.namespace}.svc:8000"
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

    def metrics(self) -> dict[str, float]:
        return {"kubernetes_calls": float(self.calls.total())}

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
        """Write what is wanted; the RayService as it is then, and the application in it."""
        replicas = self.replicas()
        for _ in range(MOST_WRITERS):
            service = self._get(cluster)
            notes = service["metadata"].get("annotations") or {}
            uid, run, place = (notes.get(f"{LABEL}{name}") for name in ("run-uid", "run", "location"))
            if uid not in (None, "", self.holder.run_uid) and not _is_over(place):
                name, namespace = self.engine.ray_service, self.infra.namespace
                raise ConfigError(
                    f"RayService {name} serves run {run!r} ({place}), which has not finished. Give this run its own "
                    f"(infra.engine.ray_service); if that run is given up: kubectl -n {namespace} annotate rayservice {name} "
                    f"{LABEL}run-uid-"
                )
            text = service["spec"].get("serveConfigV2")
            current = application_in(text)
            before = None if current is None else current["deployments"][0].get("user_config")
            wanted = desired_state(version, weights, options, [before, *(replica.desired for replica in replicas)])
            wanted["request"] = exact_request(wanted["request"])
            if weights is None and before is not None:
                wanted = before  # engines that have weights keep them
            application = dict(as_handed_on(deployment.wanted_application(config, model_dir, wanted)))
            try:
                return self._apply(cluster, service, with_application(text, application)), application
            except ApiRefused as refused:
                if refused.status != 409:
                    raise explained(refused, f"patch RayService {self.engine.ray_service}") from refused
        raise InfraError(
            f"RayService {self.engine.ray_service} was changed by others {MOST_WRITERS} times while the flow wrote to it."
        )

    def _get(self, cluster: Cluster) -> Object:
        name, namespace = self.engine.ray_service, self.infra.namespace
        try:
            return cluster.get(f"{self.collection}/{name}")
        except ApiRefused as refused:
            if refused.status != 404:
                raise explained(refused, f"get RayService {name} in namespace {namespace}") from refused
            raise ConfigError(
                f"There is no RayService {name} in namespace {namespace} (infra.engine.ray_service): {refused.message}. Apply "
                "k8s/overlays/gpu, or one like it; where RayServices are not known at all, install the chart kuberay-operator."
            ) from refused

    def _apply(self, cluster: Cluster, service: Object, text: str) -> Object:
        metadata = {
            "name": self.engine.ray_service,
            "namespace": self.infra.namespace,
            "resourceVersion": service["metadata"]["resourceVersion"],
            "annotations": self.holder.notes(),
            "labels": {f"{LABEL}run": label_value(self.holder.run_id)},
        }
        body = {"apiVersion": API, "kind": "RayService", "metadata": metadata, "spec": {"serveConfigV2": text}}
        return cluster.apply(f"{self.collection}/{self.engine.ray_service}", body, FIELD_MANAGER)


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

        changed, name = threading.Event(), self.served.engine.ray_service
        watched = Watched(
            self.cluster, self.served.collection, "", lambda _: changed.set(), fields=f"metadata.name={name}"
        )
        found, first, asked = [], None, 0
        try:
            while time.monotonic() - self.began < self.seconds:
                asked += 1
                changed.clear()
                if watched.failure is not None:
                    raise watched.failure
                watched.listed.wait(self.cluster.patience_seconds)
                there = watched.all_present()
                if watched.failure is None and not there:
                    raise InfraError(
                        f"RayService {self.served.engine.ray_service} was deleted while the flow waited for it."
                    )
                word = told(there[0] if there else {})
                first = first or word
                self.changed_since |= (word.status, word.message) != (first.status, first.message)
                found = self.served.replicas()
                digest = application_digest(self.application["args"])
                if word.is_running and deployment.all_there(found, self._count, digest, self._desired):
                    return found
                self._raise_failures(word)
                changed.wait(ASK_AGAIN.pause(asked))
        finally:
            watched.stop()
        raise DeploymentFailed(
            f"Not all {self._count} replicas of RayService {name} answered with version {self._desired['policy_version']} "
            f"within {self.seconds:g} s (generation.start_timeout_seconds + refit_timeout_seconds). KubeRay: {word.status} "
            f"{word.message}. They say: {[f'{r.replica_id}: version {r.policy_version}, {r.error}' for r in found]}. "
            f"{self._events()}"
        )

    @property
    def _count(self) -> int:
        return int(self.application["deployments"][0]["num_replicas"])

    @property
    def _desired(self) -> Object:
        return dict(self.application["deployments"][0]["user_config"])

    def _raise_failures(self, word: Told) -> None:
        waited = time.monotonic() - self.began
        name = self.served.engine.ray_service
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
        """What the cluster says of the RayService; empty where it says nothing or may not be asked."""
        namespace, name = self.served.infra.namespace, self.served.engine.ray_service
        selector = f"involvedObject.kind=RayService,involvedObject.name={name},type=Warning"
        try:
            events = self.cluster.get(f"/api/v1/namespaces/{namespace}/events", fieldSelector=selector).get("items")
        except (ApiRefused, InfraError):
            return ""
        return f"The cluster says: {events[-1].get('message')}" if events else ""


def _is_over(place: str | None) -> bool:
    """Whether the run at this place has finished, or is there no more."""
    if place is None:
        return False
    try:
        location = Location(place)
        return location.exists("summary.json") or not location.exists("run.json")
    except (StoreError, ValueError, OSError):
        return False


RUNNING = "RUNNING"
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_EXACT = 1000
"""Nanoseconds since the epoch that are a multiple of it have 16 digits that count, which a float64 keeps."""


def exact_request(number: int) -> int:
    """The next number that KubeRay hands on unchanged."""
    return -(-number // _EXACT) * _EXACT


def as_handed_on(value: Any) -> Any:
    """A JSON value as it arrives at Serve."""
    if isinstance(value, dict):
        return {key: as_handed_on(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_handed_on(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def application_in(text: str | None) -> Object | None:
    """The policy's application as it was last wanted.

    Raises:
        ConfigError: the text is no Serve configuration.
    """
    return next((each for each in _tree(text)["applications"] if each.get("name") == APPLICATION), None)


def with_application(text: str | None, application: Object) -> str:
    """The text with the policy's application in it.

    Raises:
        ConfigError: the text is no Serve configuration.
    """
    tree = _tree(text)
    others = [each for each in tree["applications"] if each.get("name") != APPLICATION]
    return yaml.safe_dump(tree | {"applications": [*others, application]}, sort_keys=False)


def _tree(text: str | None) -> Object:
    try:
        tree = yaml.safe_load(text or "") or {}
        listed = tree.setdefault("applications", []) or []
        valid = all(isinstance(each, dict) for each in listed)
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ConfigError(f"spec.serveConfigV2 of the RayService is no Serve configuration: {error}") from error
    if not valid:
        raise ConfigError(f"spec.serveConfigV2 of the RayService has applications that are none: {str(listed)[:200]}")
    return {**tree, "applications": listed}


@dataclass(frozen=True)
class Told:
    """What KubeRay says about the policy's application."""

    generation: int
    """Of the RayService when KubeRay last looked at it."""
    status: str = "unknown"
    """Serve's own word: NOT_STARTED, DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY, DELETING."""
    message: str = ""

    @property
    def is_running(self) -> bool:
        return self.status == RUNNING

    @property
    def failure(self) -> str | None:
        """Why the application cannot come up; None while it may."""
        if self.status in _FAILED or "Error" in self.message:
            return f"{self.status}: {last_lines(self.message) or 'no message'}"
        return None


def told(service: Object) -> Told:
    """From a RayService's status: of the cluster that is being made ready, else of the one that serves."""
    status = service.get("status") or {}
    generation = int(status.get("observedGeneration") or 0)
    for part in ("pendingServiceStatus", "activeServiceStatus"):
        found = ((status.get(part) or {}).get("applicationStatuses") or {}).get(APPLICATION)
        if found is not None:
            deployments = (found.get("serveDeploymentStatuses") or {}).values()
            messages = [found.get("message"), *(each.get("message") for each in deployments)]
            return Told(generation, str(found.get("status")), "\n".join(text for text in messages if text))
    return Told(generation, "no application yet")
