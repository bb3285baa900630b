"""Can a run live on this cluster?

Invariant: nothing is created: rights are asked for (SelfSubjectAccessReview), manifests are sent as a dry run. What the account
may not look at is said to be unknown, not to be missing.
"""

from __future__ import annotations

from collections.abc import Callable

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.training import ProcessService
from roundhouse.errors import RoundhouseError
from roundhouse.infra.checks import Finding, fail, ok, warn
from roundhouse.infra.kubernetes.cluster import ApiRefused, Cluster, connect
from roundhouse.infra.kubernetes.names import LABEL, StageIdentity
from roundhouse.infra.kubernetes.stage_jobs import TrainJob

OLDEST = (1, 31)
"""The first version in which a Job's podFailurePolicy is not behind a gate."""
PATIENCE_SECONDS = 10.0

Right = tuple[str, str, str]

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
ENGINE: tuple[Right, ...] = tuple((verb, "ray.io", "rayservices") for verb in ("get", "list", "watch", "patch"))
"""The same, where the engine is a RayService."""
DANGEROUS: tuple[Right, ...] = (("get", "", "secrets"), ("create", "", "pods"), ("create", "", "pods/exec"))
"""What a run never does, and what its token therefore should not permit."""


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
    needed = NEEDED + (ENGINE if infra.engine is not None else ())
    missing = [_in_words(right) for right in needed if not _may(connection, infra, right)]
    excess = [_in_words(right) for right in DANGEROUS if _may(connection, infra, right)]
    place = f"in namespace {infra.namespace}"
    if missing:
        remedy = "kubectl apply -k k8s/overlays/<yours>: Role and RoleBinding roundhouse-flow (k8s/base/rbac.yaml)."
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
    known = _has_group(connection, "ray.io")
    if infra.engine is None:
        return [ok("kuberay", "RayService is known; no engine of this run is one")] if known else []
    name, remedy = infra.engine.ray_service, "Install the chart kuberay-operator 1.6 or newer."
    if not known:
        return [fail("kuberay", f"infra.engine names RayService {name}, which the cluster knows nothing of", remedy)]
    try:
        service = connection.get(f"/apis/ray.io/v1/namespaces/{infra.namespace}/rayservices/{name}")
    except ApiRefused as refused:
        if refused.status != 404:
            return [warn("kuberay", f"this account may not look at RayService {name}", "See the finding on rights.")]
        detail = f"infra.engine.ray_service: there is no {name} in {infra.namespace}"
        return [fail("kuberay", detail, "kubectl apply -k k8s/overlays/gpu, or change the key.")]
    if not service.get("status"):
        return [warn("kuberay", f"RayService {name} exists, but no operator has reported on it", remedy)]
    holder = (service["metadata"].get("annotations") or {}).get(f"{LABEL}run")
    return [ok("kuberay", f"RayService {name} is there and {f'serves run {holder}' if holder else 'free'}")]


def queue(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    if infra.queue is None:
        return []
    if not _has_group(connection, "kueue.x-k8s.io"):
        detail = f"infra.queue is {infra.queue}, but the cluster has no Kueue: Jobs would stay suspended for ever"
        return [fail("queue", detail, "Install Kueue, or unset infra.queue.")]
    return [ok("queue", f"Kueue is there; Jobs go to LocalQueue {infra.queue}")]


def gpus(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    wanted = infra.trainer.pods * infra.trainer.gpus
    if not wanted:
        return []
    try:
        nodes = connection.get("/api/v1/nodes").get("items") or []
    except ApiRefused:
        remedy = "Ask an administrator for `kubectl describe nodes`: nvidia.com/gpu under Allocatable."
        return [warn("gpus", "this account may not list nodes, so their GPUs are not known", remedy)]
    each = sorted((int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) for node in nodes), reverse=True)
    pods = sum(count // infra.trainer.gpus for count in each)
    detail = (
        f"{wanted} GPUs wanted ({infra.trainer.pods} pods of {infra.trainer.gpus}); nodes have {[n for n in each if n]}"
    )
    if pods < infra.trainer.pods:
        remedy = "Add nodes or the NVIDIA device plugin, or lower infra.trainer.pods or gpus; an autoscaler may add them later."
        return [warn("gpus", detail, remedy)]
    return [ok("gpus", detail)]


def objects(connection: Cluster, infra: KubernetesInfra) -> list[Finding]:
    """What pods name: a missing one is found by a pod only when it starts."""
    named = [("serviceaccounts", infra.service_account, "infra.service_account")]
    named += [("secrets", infra.secret, "infra.secret")] if infra.secret else []
    named += [("secrets", infra.gym.secret, "infra.gym.secret")] if infra.gym.secret else []
    if (pods := infra.collector) is not None:
        named.append(("serviceaccounts", pods.service_account, "infra.collector.service_account"))
        named += [("secrets", pods.secret, "infra.collector.secret")] if pods.secret else []
    claims = {"infra.store_claim": infra.store_claim, "infra.trainer.cache_claim": infra.trainer.cache_claim}
    named += [("persistentvolumeclaims", claim, key) for key, claim in claims.items() if claim]
    found = []
    for plural, name, key in named:
        try:
            connection.get(f"/api/v1/namespaces/{infra.namespace}/{plural}/{name}")
            found.append(ok(plural, f"{key}: {name} is there"))
        except ApiRefused as refused:
            remedy = f"kubectl get {plural} {name} -n {infra.namespace}"
            if refused.status == 404:
                found.append(
                    fail(plural, f"{key}: there is no {name} in {infra.namespace}", f"Create it, or change {key}.")
                )
            else:
                found.append(warn(plural, f"{key}: this account may not look at {name}", f"Look yourself: {remedy}"))
    return found


def _may(connection: Cluster, infra: KubernetesInfra, right: Right) -> bool:
    verb, group, resource = right
    resource, _, sub = resource.partition("/")
    asked = {"namespace": infra.namespace, "verb": verb, "group": group, "resource": resource, "subresource": sub}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    answer = connection.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer["status"].get("allowed"))


def _has_group(connection: Cluster, group: str) -> bool:
    groups = connection.get("/apis").get("groups") or []
    return any(item["name"] == group for item in groups)


def _in_words(right: Right) -> str:
    verb, group, resource = right
    return f"{verb} {resource}{f'.{group}' if group else ''}"
