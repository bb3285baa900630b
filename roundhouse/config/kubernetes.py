"""Placement of a run's processes on a Kubernetes cluster: the section `infra` with `kind: kubernetes`.

Invariant: these keys change the place and limits of the work, never its result. Secrets are named, never held.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from roundhouse.config.section import Code, PositiveFloat, PositiveInt, Section, is_recorded

Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")]
"""An amount as Kubernetes writes it: 500m, 8Gi."""
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


IN_CLUSTER_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def own_namespace() -> str:
    """Return the namespace of this process's pod; "roundhouse" outside of a cluster."""
    try:
        return Path(IN_CLUSTER_NAMESPACE).read_text().strip() or "roundhouse"
    except OSError:
        return "roundhouse"


class Toleration(Section):
    """A taint that pods accept."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    """Unset: Equal with a value, else Exists."""
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _operator(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("value") is not None:
            return {"operator": "Equal"} | given
        return given

    @model_validator(mode="after")
    def _as_kubernetes_has_it(self, info: ValidationInfo) -> Self:
        if is_recorded(info):
            return self
        if self.operator == "Exists" and self.value:
            raise ValueError(f"operator is Exists and value {self.value!r}: set operator to Equal, or leave value out.")
        if self.operator == "Equal" and not self.key:
            raise ValueError(f"operator is Equal and value {self.value!r}, without a key. Name the taint's key.")
        return self


TRAINER_IMAGE = "roundhouse/trainer:0.1.0"
"""Image name as tagged by images/build.sh, without the device."""


class Pods(Section):
    """Common settings of pods."""

    cpu: Quantity
    """CPU of each pod, as a request."""
    memory: Quantity
    """Memory of each pod, as request and limit."""
    scratch: Quantity
    """Disk for temporary files."""
    pending_seconds: PositiveInt = 1800
    """Time that a pod may wait for a node."""
    image_seconds: PositiveInt = 300
    """Time that a container may fail to start (image pull, missing secret) before its work fails."""
    priority_class: ObjectName | None = None
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that pods may run on."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that pods accept. The default operator is Equal with a value, else Exists."""


class TrainerPods(Pods):
    """The pods of a training step (`train.service.kind: process`), or of ranks that stay (`resident`, with `launcher:
    kubernetes`). Each runs `train.service.processes` processes."""

    image: Code[Annotated[str, Field(min_length=1)] | None] = None
    """Image with the trainer; name a digest in production. Unset: roundhouse/trainer:0.1.0-cpu, or -cuda if gpus are
    requested."""
    pods: PositiveInt = 1
    """Above 1, torchrun makes one group of the processes of all pods."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of each pod."""
    cpu: Quantity = "2"
    memory: Quantity = "8Gi"
    shared_memory: Quantity = "2Gi"
    """Size of /dev/shm; counts as memory."""
    scratch: Quantity = "50Gi"
    """Disk for downloaded checkpoints and temporary files."""
    cache_claim: ObjectName | None = None
    """PersistentVolumeClaim, preferably of a disk of the node, in which steps leave checkpoints for the next one.
    Unset: each fetches its checkpoint from the store. Only for a store that is a bucket."""
    cache_gib: PositiveFloat = 200
    """Size limit of its checkpoints, the longest unused deleted first; less than the claim has."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of replacements of a failed pod by Kubernetes, in addition to the task's retries."""


class OwnPods(Pods):
    """Pods with a separate account, secret and variables, in addition to infra.environment."""

    image: Code[Annotated[str, Field(min_length=1)]]
    """Image of these pods; name a digest in production."""
    service_account: ObjectName
    """Service account of these pods. Its token is not mounted; a cloud's workload identity uses its annotations."""
    secret: ObjectName | None = None
    """Secret whose keys become environment variables."""
    environment: Code[dict[VariableName, str]] = Field(default_factory=dict)
    """More variables, in addition to infra.environment. No secrets: the run's configuration is stored."""


class CollectorPods(OwnPods):
    """The pods of a collection's shards, with `rollout.distribution.kind: job`: one a shard. An environment in process runs in
    them, so the image needs its modules, and servers are called from them."""

    image: Code[Annotated[str, Field(min_length=1)]] = "roundhouse/flow:0.1.0"
    """With the collector and the environment in it; name a digest in production."""
    cpu: Quantity = "1"
    memory: Quantity = "2Gi"
    scratch: Quantity = "10Gi"
    service_account: ObjectName = "roundhouse-collector"
    secret: ObjectName | None = None
    """Secret whose keys become environment variables: for the store and for gym servers. It must not contain the
    engine's token, whose holder can change weights."""


class GymPods(OwnPods):
    """The pods of a run's own NeMo Gym (`environment.kind: nemo_gym`): one for the head server and one for each server."""

    image: Code[Annotated[str, Field(min_length=1)]] = "roundhouse/gym:0.1.0"
    """With every environment and foreign server of the configuration in it, at the same paths as in the flow's; name a digest
    in production."""
    cpu: Quantity = "500m"
    memory: Quantity = "1Gi"
    scratch: Quantity = "1Gi"
    pending_seconds: PositiveInt = 1800
    """Time that a pod may wait for a node; `environment.start_timeout_seconds` limits the whole start."""
    service_account: ObjectName = "roundhouse-gym"
    secret: ObjectName | None = None
    """Secret whose keys become environment variables: keys of a judge's endpoint, …. The configuration names one as
    `${oc.env:NAME}`."""


class RayServiceEngine(Section):
    """A RayService of KubeRay that answers for the policy. Its resources (GPUs, autoscaling bounds) are in its manifest."""

    ray_service: ObjectName | None = None
    """Its name, in infra.namespace. One run at a time writes to it; several runs have one each. Unset: the run makes a
    RayService of `manifest` and deletes it at its end."""
    manifest: Code[str | None] = None
    """File with the RayService that the run makes, as k8s/overlays/gpu/rayservice.yaml; on the flow's machine."""
    url: Code[str | None] = None
    """Base URL for a flow outside of the cluster. Unset: its Service, <ray_service>-serve-svc."""
    operator_seconds: PositiveFloat = 180
    """Time that KubeRay may take to notice the wanted state before it counts as dead."""

    @model_validator(mode="after")
    def _named_or_made(self, info: ValidationInfo) -> Self:
        if not is_recorded(info) and (self.ray_service is None) == (self.manifest is None):
            raise ValueError(
                f"ray_service is {self.ray_service!r} and manifest {self.manifest!r}: set ray_service to use a RayService that "
                "exists, or manifest to let the run make its own; not both."
            )
        return self


class InfraSection(Section):
    """Base of every kind of infrastructure."""

    if TYPE_CHECKING:
        kind: str
        state: str
    runs_here: ClassVar[bool] = True
    """Engine, trainer and sandboxes use this machine."""

    @property
    def cluster(self) -> KubernetesInfra | None:
        """Return the section of a cluster; None for another kind."""
        return None

    @property
    def has_engine(self) -> bool:
        """Return whether the plug-in of this infrastructure opens the engine; else it is named, or on the services' Ray."""
        return False

    def loads_from(self, store: str) -> bool:
        """Return whether the engine has a disk of its own, and loads models from a store."""
        return False

    @property
    def release_remedy(self) -> str:
        """Return how a person releases an engine that the run could not release."""
        return ""

    def superfluous_services(self) -> set[str]:
        """Return services that a run does not start: they run elsewhere."""
        return set()

    def server_arguments(self) -> dict[str, list[str]]:
        """Return arguments of the local servers: the configured separate database of each, else none.

        Raises:
            ConfigError: its driver is not installed.
        """
        return {"prefect": [], "mlflow": []}


class KubernetesInfra(InfraSection):
    """Pods of a cluster. The flow itself runs in one of them, or elsewhere with a kubeconfig."""

    runs_here: ClassVar[bool] = False
    kind: Literal["kubernetes"] = "kubernetes"
    state: Code[str] = ".roundhouse"
    """Directory on the flow's own machine, for its cache."""
    namespace: DnsLabel = Field(default_factory=own_namespace)
    """Unset: that of the flow's pod, else `roundhouse`."""
    context: Code[str | None] = None
    """Context of the kubeconfig. Unset: the pod's service account, else the current context."""
    trainer: TrainerPods = TrainerPods()
    collector: CollectorPods | None = None
    """The pods of a collection that is spread over Jobs. Unset: not used."""
    gym: GymPods = GymPods()
    engine: RayServiceEngine | None = None
    """The engine under KubeRay. Unset: generation.engine_url names one, or Ray Serve runs next to the flow."""
    service_account: ObjectName = "roundhouse-trainer"
    """Service account of the trainer's pods. Its token is not mounted; a cloud's workload identity uses its
    annotations."""
    secret: ObjectName | None = None
    """Secret whose keys become environment variables of the pods: AWS_ACCESS_KEY_ID, …; not needed with workload
    identity."""
    environment: Code[dict[VariableName, str]] = Field(default_factory=dict)
    """More variables of the pods, such as AWS_ENDPOINT_URL. No secrets: the run's configuration is stored."""
    store_claim: ObjectName | None = None
    """PersistentVolumeClaim that holds the store, mounted at the store's path; for a store that is not a bucket."""
    queue: ObjectName | None = None
    """Kueue LocalQueue that admits the Jobs."""
    queue_priority: ObjectName | None = None
    """Kueue WorkloadPriorityClass of the Jobs, by which the queue admits and preempts. Unset: by the value of the pods'
    priority_class."""
    queue_seconds: PositiveInt = 86_400
    """Time that a Job may wait in the queue."""
    keep_jobs_seconds: Annotated[int, Field(ge=0)] = 86_400
    """Time that finished Jobs and their pods are kept."""
    api_outage_seconds: PositiveFloat = 300
    """Time that the API server may be unreachable before a stage fails; its Jobs keep running, and the stage's retry
    finds them."""

    @property
    def cluster(self) -> KubernetesInfra:
        return self

    @property
    def has_engine(self) -> bool:
        return self.engine is not None

    def loads_from(self, store: str) -> bool:
        return self.engine is not None or store.startswith("s3://")

    @property
    def release_remedy(self) -> str:
        return f"To release them: kubectl -n {self.namespace} delete rayservice …, or start and end another run on it."

    def superfluous_services(self) -> set[str]:
        superfluous = set() if self.engine is None else {"ray"}
        return superfluous | ({"prefect"} if "PREFECT_API_URL" in os.environ else set())

    @model_validator(mode="after")
    def _priority_of_a_queue(self, info: ValidationInfo) -> Self:
        if not is_recorded(info) and self.queue_priority is not None and self.queue is None:
            raise ValueError(
                f"queue_priority is {self.queue_priority!r}, and no queue is named: set queue to a LocalQueue, or remove it."
            )
        return self
