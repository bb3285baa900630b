"""Check whether a run can work on a cluster.

Invariant: nothing is created: rights are queried (SelfSubjectAccessReview), manifests are sent as a dry run. Objects
that the account may not read are reported as unknown, not as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.training import ProcessService
from roundhouse.errors import RoundhouseError
from roundhouse.infra.checks import Finding, fail, ok, warn
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster, connect
from roundhouse.plugins.kubernetes.names import LABEL, StageIdentity
from roundhouse.plugins.kubernetes.serve_config import application_in
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob

OLDEST = (1, 31)
"""The first version in which a Job's podFailurePolicy needs no feature gate."""
PATIENCE_SECONDS = 10.0

KUEUE = "kueue.x-k8s.io"
INSTALL = "Install the chart kuberay-operator 1.5 or newer."

Right = tuple[str, str, str]
Object = dict[str, Any]

NEEDED: tuple[Right, ...] = (
    *((verb, "", "configmaps") for verb in ("create", "get")),
    *((verb, "", "services") for verb in ("create", "get", "delete")),
    *((verb, "", "secrets") for verb in ("create", "delete")),
    *((verb, "batch", "jobs") for verb in ("create", "get", "list", "watch", "delete")),
    *((verb, "", "pods") for verb in ("list", "watch")),
    ("get", "", "pods/log"),
    ("list", "", "events"),
)
"""(verb, group, resource) of every call that a run makes; k8s/base/rbac.yaml grants exactly these."""
ENGINE: tuple[Right, ...] = (
    *((verb, "ray.io", "rayservices") for verb in ("get", "list", "watch", "patch")),
    *((verb, "ray.io", "rayclusters") for verb in ("get", "delete")),
)
"""The same for an engine that is a RayService."""
OWN_ENGINE: tuple[Right, ...] = tuple((verb, "ray.io", "rayservices") for verb in ("create", "delete"))
"""In addition, if the run makes its RayService; k8s/components/run-engine grants these."""
DANGEROUS: tuple[Right, ...] = (("get", "", "secrets"), ("create", "", "pods"), ("create", "", "pods/exec"))
"""Rights that a run never uses, and that its token should therefore not have."""


def cluster(infra: KubernetesInfra) -> list[Finding]:
    """All findings; ends within seconds if the API server does not answer."""
    try:
        connection = connect(infra.model_copy(update={"api_outage_seconds": PATIENCE_SECONDS}))
    except RoundhouseError as error:
        return [fail("cluster", str(error), "Set KUBECONFIG, or run this in a pod of the cluster.")]
    try:
        version = connection.get("/version")
    except (RoundhouseError, ApiRefused) as error:
        connection.close()
        remedy = "Check the server's address and certificate in the kubeconfig, and that this machine reaches it."
        return [fail("cluster", str(error), remedy)]
    checks: list[Callable[[Cluster, KubernetesInfra], list[Finding]]] = [rights, job, ray, queue, gpus, objects]
    running = f"{connection.host} is {version.get('gitVersion')}"
    digits = [int("".join(c for c in str(version.get(key, "0")) if c.isdigit()) or 0) for key in ("major", "minor")]
    if tuple(digits) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        findings = [fail("cluster", running, f"Upgrade to {needed} or newer: Jobs need podFailurePolicy.")]
    else:
        findings = [ok("cluster", running)]
    try:
        for check in checks:
            try:
                findings += check(connection, infra)
            except (RoundhouseError, ApiRefused) as error:
                findings.append(fail(check.__name__, str(error), "Look at the API server, and start again."))
        return findings
    finally:
        connection.close()


def rights(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    """By asking the API server, which knows all its authorizers."""
    needed = NEEDED
    if infra.engine is not None:
        needed += ENGINE + (OWN_ENGINE if infra.engine.ray_service is None else ())
    missing = [_in_words(right) for right in needed if not _may(connection, infra, right)]
    excess = [_in_words(right) for right in DANGEROUS if _may(connection, infra, right)]
    place = f"in namespace {infra.namespace}"
    if missing:
        remedy = "kubectl apply -k k8s/overlays/<yours>: Role and RoleBinding roundhouse-flow (k8s/base/rbac.yaml)."
        if any(_in_words(right) in missing for right in OWN_ENGINE):
            remedy = "Name ../../components/run-engine under components of your overlay: a run that makes its engine needs it."
        return [fail("rights", f"not allowed {place}: {', '.join(missing)}", remedy)]
    if excess:
        remedy = "Run flows as the service account roundhouse-flow, which may do only what a run does."
        return [warn("rights", f"all that a run needs {place}, and more: {', '.join(excess)}", remedy)]
    return [ok("rights", f"exactly what a run needs {place}")]


def job(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    """Would the API server, with its quota and its admission, take a training Job?"""
    identity = StageIdentity("doctor", "000000000000", 0, "train", "0" * 16)
    plan = TrainJob(identity, infra, ProcessService(), reports="s3://doctor/reports", store="s3://doctor")
    if infra.store_claim:
        plan = TrainJob(identity, infra, ProcessService(), reports="/store/reports", store="/store")
    owner = {**plan.run_object(), "metadata": plan.run_object()["metadata"] | {"uid": "0" * 8}}
    path = f"/apis/batch/v1/namespaces/{infra.namespace}/jobs"
    try:
        connection.create(path, plan.job(1, owner), dry_run=True)
    except ApiRefused as refused:
        remedy = "Change infra.trainer or the quota."
        if refused.status == 404:
            remedy = "Create the namespace (k8s/base/namespace.yaml), or set infra.namespace."
        return [fail("job", f"a training Job is refused: {refused.message}", remedy)]
    return [ok("job", "a training Job is accepted (dry run)")]


def ray(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    known = _served_version(connection, "ray.io") is not None
    if infra.engine is None:
        return [ok("kuberay", "RayService is known; no engine of this run is one")] if known else []
    name = infra.engine.ray_service or f"of {infra.engine.manifest}"
    if not known:
        return [fail("kuberay", f"infra.engine names RayService {name}, which the cluster knows nothing of", INSTALL)]
    if infra.engine.ray_service is None:
        return [ok("kuberay", f"RayServices are known; the run makes its own of {infra.engine.manifest}")]
    try:
        service = connection.get(f"/apis/ray.io/v1/namespaces/{infra.namespace}/rayservices/{name}")
    except ApiRefused as refused:
        if refused.status != 404:
            return [warn("kuberay", f"this account may not look at RayService {name}", "See the finding on rights.")]
        detail = f"infra.engine.ray_service: {name} does not exist in {infra.namespace}"
        return [fail("kuberay", detail, "kubectl apply -k k8s/overlays/gpu, or change the key.")]
    return [engine_state(service, _engine_pods(connection, infra, service), infra.namespace)]


def _engine_pods(connection: Cluster, infra: KubernetesInfra, service: Object) -> list[Object]:
    """Return the pods of the RayService's clusters, active and pending."""
    status = service.get("status") or {}
    names = [(status.get(part) or {}).get("rayClusterName") for part in ("activeServiceStatus", "pendingServiceStatus")]
    path = f"/api/v1/namespaces/{infra.namespace}/pods"
    return [
        pod
        for name in names
        if name
        for pod in connection.get(path, labelSelector=f"ray.io/cluster={name}").get("items") or []
    ]


def engine_state(service: Object, pods: list[Object], namespace: str) -> Finding:
    """Return whether the engine can serve: by its pods' containers, then by the condition `Ready` of the RayService.

    Without an application, KubeRay does not report Ready; then the head's own readiness counts.
    """
    name, status = service["metadata"]["name"], service.get("status") or {}
    if not status:
        return warn("kuberay", f"RayService {name} exists, but no operator has reported on it", INSTALL)
    for pod in pods:
        if (trouble := _container_trouble(pod)) is not None:
            container, text = trouble
            remedy = f"kubectl -n {namespace} logs {pod['metadata']['name']} -c {container} --previous"
            return fail("kuberay", f"RayService {name}: {text}", remedy)
    holder = (service["metadata"].get("annotations") or {}).get(f"{LABEL}run")
    use = f"serves run {holder}" if holder else "free"
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    ready = conditions.get("Ready", {})
    if ready.get("status") == "True":
        return ok("kuberay", f"RayService {name} is Ready and {use}")
    heads = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("ray.io/node-type") == "head"]
    if application_in(service["spec"].get("serveConfigV2")) is None and any(map(_is_ready, heads)):
        return ok("kuberay", f"RayService {name} has a head that is ready, no replicas, and is {use}")
    reason = ready.get("reason") or "no condition Ready"
    detail = f"RayService {name} is not Ready ({reason}: {ready.get('message') or 'no message'}) and {use}"
    return warn(
        "kuberay", detail, f"kubectl -n {namespace} describe rayservice {name}; kubectl -n {namespace} get pods"
    )


def _container_trouble(pod: Object) -> tuple[str, str] | None:
    """Return the container of a pod that cannot start or that ended, and the reason; None if all are on their way."""
    status, name = pod.get("status") or {}, pod["metadata"]["name"]
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = container.get("state", {}).get("waiting") or {}
        ended = (container.get("lastState") or {}).get("terminated") or {}
        restarts = int(container.get("restartCount") or 0)
        can_wait = waiting.get("reason", "ContainerCreating") in ("ContainerCreating", "PodInitializing")
        if can_wait and not (restarts and not container.get("ready")):
            continue
        reason = waiting.get("reason") or ended.get("reason") or "restarted"
        exit_code = f", exit code {ended['exitCode']}" if "exitCode" in ended else ""
        message = waiting.get("message") or ended.get("message") or ""
        text = f"container {container['name']} of pod {name}: {reason}{exit_code}, {restarts} restarts. {message}"
        return container["name"], text.strip()
    return None


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def queue(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    """Look up the LocalQueue and the priority that the configuration names: a Job of a missing one is never admitted."""
    if infra.queue is None:
        return []
    version = _served_version(connection, KUEUE)
    if version is None:
        detail = f"infra.queue is {infra.queue}, but Kueue is not installed: Jobs would stay suspended"
        return [fail("queue", detail, "Install Kueue, or unset infra.queue.")]
    group = f"/apis/{KUEUE}/{version}"
    place = f"{group}/namespaces/{infra.namespace}"
    item, finding = _look_up(connection, place, "localqueues", infra.queue, "infra.queue", infra.namespace)
    findings = [finding if item is None else _queue_state(item, infra)]
    if infra.queue_priority is not None:
        findings.append(
            _look_up(connection, group, "workloadpriorityclasses", infra.queue_priority, "infra.queue_priority")[1]
        )
    return findings


def _queue_state(item: Object, infra: KubernetesInfra) -> Finding:
    """Return whether a LocalQueue admits, by its condition `Active`."""
    conditions = {each["type"]: each for each in (item.get("status") or {}).get("conditions") or []}
    active = conditions.get("Active")
    detail = f"infra.queue: LocalQueue {infra.queue} in {infra.namespace}"
    if active is None:
        return warn("queue", f"{detail} has no condition Active", "Start Kueue's manager, which sets it.")
    if active["status"] != "True":
        reason = f"{active.get('reason')}: {active.get('message') or 'no message'}"
        remedy = f"kubectl -n {infra.namespace} describe localqueue {infra.queue}; its ClusterQueue has to be active."
        return fail("queue", f"{detail} admits nothing ({reason})", remedy)
    return ok("queue", f"{detail} is active")


def gpus(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    gpu_count = infra.trainer.pods * infra.trainer.gpus
    if not gpu_count:
        return []
    try:
        nodes = connection.get("/api/v1/nodes").get("items") or []
    except ApiRefused:
        remedy = "Ask an administrator for `kubectl describe nodes`: nvidia.com/gpu under Allocatable."
        return [warn("gpus", "this account may not list nodes, so their GPUs are not known", remedy)]
    each = sorted((int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) for node in nodes), reverse=True)
    pods = sum(count // infra.trainer.gpus for count in each)
    detail = f"{gpu_count} GPUs wanted ({infra.trainer.pods} pods of {infra.trainer.gpus}); nodes have {[n for n in each if n]}"
    if pods < infra.trainer.pods:
        remedy = "Add nodes or the NVIDIA device plugin, or lower infra.trainer.pods or gpus; an autoscaler may add them later."
        return [warn("gpus", detail, remedy)]
    return [ok("gpus", detail)]


def objects(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    """Check the objects that pods name: a missing one shows only when a pod starts."""
    named = [("serviceaccounts", infra.service_account, "infra.service_account")]
    named += [("secrets", infra.secret, "infra.secret")] if infra.secret else []
    named += [("secrets", infra.gym.secret, "infra.gym.secret")] if infra.gym.secret else []
    if (pods := infra.collector) is not None:
        named.append(("serviceaccounts", pods.service_account, "infra.collector.service_account"))
        named += [("secrets", pods.secret, "infra.collector.secret")] if pods.secret else []
    claims = {"infra.store_claim": infra.store_claim, "infra.trainer.cache_claim": infra.trainer.cache_claim}
    named += [("persistentvolumeclaims", claim, key) for key, claim in claims.items() if claim]
    place = f"/api/v1/namespaces/{infra.namespace}"
    return [_look_up(connection, place, plural, name, key, infra.namespace)[1] for plural, name, key in named]


def _look_up(
    connection: Cluster, place: str, plural: str, name: str, key: str, namespace: str = ""
) -> tuple[Object | None, Finding]:
    """Return an object that a configuration key names, or None, with the finding.

    Args:
        place: path of the API in which the plural is.
        namespace: empty for objects of the cluster.
    """
    where, option = (f" in {namespace}", f" -n {namespace}") if namespace else ("", "")
    try:
        item = connection.get(f"{place}/{plural}/{name}")
    except ApiRefused as refused:
        if refused.status == 404:
            return None, fail(plural, f"{key}: {name} does not exist{where}", f"Create it, or change {key}.")
        remedy = f"Look yourself: kubectl get {plural} {name}{option}"
        return None, warn(plural, f"{key}: this account may not look at {name}", remedy)
    return item, ok(plural, f"{key}: {name} is there")


def _may(connection: Cluster, infra: KubernetesInfra, right: Right) -> bool:
    verb, group, resource = right
    resource, _, sub = resource.partition("/")
    attributes = {"namespace": infra.namespace, "verb": verb, "group": group, "resource": resource, "subresource": sub}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = connection.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer["status"].get("allowed"))


def _served_version(connection: Cluster, group: str) -> str | None:
    """Return the version of an API group that the server prefers; None if it does not know the group."""
    for item in connection.get("/apis").get("groups") or []:
        if item["name"] == group:
            return str(item["preferredVersion"]["version"])
    return None


def _in_words(right: Right) -> str:
    verb, group, resource = right
    return f"{verb} {resource}{f'.{group}' if group else ''}"
