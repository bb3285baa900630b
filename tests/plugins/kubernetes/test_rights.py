"""The flow's account: the calls of a run are allowed, all others are refused, and the doctor reports both.

With a real API server and a token of the real service account.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiClient, Configuration
from typer.testing import CliRunner

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import DataError
from roundhouse.plugins.kubernetes import checks
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster
from roundhouse.plugins.kubernetes.job import Unwanted
from roundhouse.plugins.kubernetes.rayservice import RayServiceServed, ServedRun
from roundhouse.plugins.kubernetes.stage_jobs import PLACE
from tests.k8s.api_server import api_server
from tests.plugins.kubernetes.control_plane import ControlPlane
from tests.plugins.kubernetes.kuberay import FakeServe, Operator, answering, install_crd
from tests.plugins.kubernetes.stand import Stand, cluster_of, real_stand
from tests.plugins.kubernetes.test_rayservice import manifest
from tests.plugins.kubernetes.test_shard_jobs import plan as shard_plan
from tests.waiting import until

Object = dict[str, Any]

BASE = Path(__file__).parents[3] / "k8s/base"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces"


PLURALS = {
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "ServiceAccount": "serviceaccounts",
    "ConfigMap": "configmaps",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}


def install(stand: Stand, *files: str) -> None:
    for file in files:
        for item in yaml.safe_load_all((BASE / file).read_text()):
            for subject in item.get("subjects", []):
                subject["namespace"] = stand.namespace
            prefix = f"/apis/{item['apiVersion']}" if "/" in item["apiVersion"] else f"/api/{item['apiVersion']}"
            is_cluster_wide = item["kind"].startswith("ValidatingAdmissionPolicy")
            place = "" if is_cluster_wide else f"/namespaces/{stand.namespace}"
            try:
                stand.admin.create(f"{prefix}{place}/{PLURALS[item['kind']]}", item)
            except ApiRefused as refused:
                if not is_cluster_wide or refused.status != 409:
                    raise


@pytest.fixture
def as_flow(plane: ControlPlane, tmp_path: Path) -> Iterator[Stand]:
    """A stand that runs the tested code as the service account roundhouse-flow."""
    if not plane.has_controllers:
        pytest.skip("needs the Job controller: put kube-controller-manager into KUBEBUILDER_ASSETS")
    with real_stand(plane) as stand:
        install(stand, "accounts.yaml", "rbac.yaml", "admission.yaml")
        path = f"/api/v1/namespaces/{stand.namespace}/serviceaccounts/roundhouse-flow/token"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        token = stand.admin.create(path, request)["status"]["token"]
        tree = yaml.safe_load(stand.kubeconfig.read_text())
        tree["users"][0]["user"] = {"token": token}
        stand.kubeconfig = tmp_path / "flow"
        stand.kubeconfig.write_text(yaml.safe_dump(tree))
        stand.cluster = cluster_of(stand.kubeconfig)
        until(lambda: refusal(stand, lambda job: job["spec"]["template"]["spec"].pop("serviceAccountName")), "policies")
        yield stand


def refusal(stand: Stand, change: Callable[[Object], Any]) -> str:
    """Return the API server's refusal of a changed training Job, tried as the flow; "" if it is accepted."""
    plan = stand.plan(secret="roundhouse-store", trainer={"cache_claim": "roundhouse-cache"})
    owner = plan.run_object() | {"metadata": plan.run_object()["metadata"] | {"uid": "1" * 8}}
    job = plan.job(1, owner)
    change(job)
    try:
        stand.cluster.create(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs", job, dry_run=True)
    except ApiRefused as refused:
        return refused.message
    return ""


def test_the_flows_account_may_do_all_that_a_run_does(as_flow: Stand) -> None:
    assert as_flow.run(as_flow.plan(trainer={"pods": 2})) == 1
    assert as_flow.run(as_flow.plan(trainer={"pods": 2})) == 1, "found: get"

    def fail(pod: Object) -> None:
        as_flow.kubelet.run(pod)
        as_flow.kubelet.exit(pod, 65)

    as_flow.kubelet.behave = fail
    with pytest.raises(DataError):  # lists pods, reads a log
        as_flow.run(as_flow.plan(digest="another01"))
    as_flow.kubelet.behave = lambda pod: as_flow.kubelet.stuck(pod, "ErrImagePull", "reset")
    with pytest.raises(Exception, match="cannot be pulled"):  # deletes the Job, and sees it gone
        as_flow.run(as_flow.plan(digest="third0000", trainer={"image_seconds": 1}))


def test_the_flows_account_may_do_all_that_a_collection_over_jobs_does_and_has_no_more_rights_for_it(
    as_flow: Stand,
) -> None:
    stopped = threading.Event()
    with as_flow.jobs() as jobs:
        assert jobs.run(shard_plan(as_flow.namespace), as_flow.said.append) == 1
        assert jobs.run(shard_plan(as_flow.namespace), as_flow.said.append) == 1, "found: get"

        def behave(pod: Object) -> None:
            as_flow.kubelet.run(pod)
            stopped.set()

        as_flow.kubelet.behave = behave
        unwanted = shard_plan(as_flow.namespace, "another01")
        with pytest.raises(Unwanted):  # deletes the Job, and sees it gone
            jobs.run(unwanted, as_flow.said.append, stopped=stopped)
        owner = as_flow.admin.get(
            f"/api/v1/namespaces/{as_flow.namespace}/configmaps/{unwanted.run_object()['metadata']['name']}"
        )
        path = f"/apis/batch/v1/namespaces/{as_flow.namespace}/jobs"
        as_flow.admin.create(path, shard_plan(as_flow.namespace, "third0000").job(1, owner))
        with as_flow.jobs() as later:
            later.end_others({PLACE: unwanted.stage}, ())
        assert [job["metadata"]["name"][-10:] for job in as_flow.found("jobs")] == ["89abcdef-1"]
    used = {call for call in as_flow.cluster.calls if not call.endswith("pods/log")}
    granted = {f"{verb} {resource}" for verb, _, resource in checks.NEEDED}
    assert {call.replace("get jobs", "list jobs").replace("get pods", "list pods") for call in used} <= granted


def test_the_flows_account_may_refit_a_rayservice_and_neither_make_nor_delete_one(
    as_flow: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_crd(as_flow.admin)
    monkeypatch.setenv("KUBECONFIG", str(as_flow.kubeconfig))
    path = f"/apis/ray.io/v1/namespaces/{as_flow.namespace}/rayservices"
    found = statuses(as_flow, monkeypatch, engine={"ray_service": "engine"})
    assert (found["rights"].status, found["kuberay"].status) == ("ok", "fail")
    as_flow.admin.create(path, manifest("engine", as_flow.namespace))
    assert statuses(as_flow, monkeypatch, engine={"ray_service": "engine"})["kuberay"].status == "warn"
    serve = FakeServe()
    operator = Operator(as_flow.admin, as_flow.namespace, serve)
    try:
        with answering(serve) as url:
            engine = {"ray_service": "engine", "url": url}
            infra = KubernetesInfra.model_validate({"namespace": as_flow.namespace, "engine": engine})
            assert infra.engine is not None
            served = RayServiceServed(infra, infra.engine, ServedRun("mine", "uid", "/nowhere"))
            assert len(served.ensure(GenerationConfig(replicas=1), "s3://b/0", "s3://b/1", 1)) == 1
    finally:
        operator.stop()
    found = statuses(as_flow, monkeypatch, engine={"ray_service": "engine"})
    assert "serves run mine" in found["kuberay"].detail
    for attempt in (
        lambda: as_flow.cluster.create(path, manifest("another", as_flow.namespace)),
        lambda: as_flow.cluster.apply(f"{path}/another", manifest("another", as_flow.namespace), "roundhouse"),
        lambda: as_flow.cluster.delete(f"{path}/engine"),
    ):
        with pytest.raises(ApiRefused, match="403 Forbidden"):
            attempt()
    service = as_flow.admin.get(f"{path}/engine")
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["serviceAccountName"] = "roundhouse-flow"
    with pytest.raises(ApiRefused, match="may change what a RayService serves, and not its cluster"):
        as_flow.cluster.patch(f"{path}/engine", {"spec": service["spec"]})


def test_a_flow_that_makes_its_engine_gives_it_no_account_but_an_engines(as_flow: Stand) -> None:
    install_crd(as_flow.admin)
    rights = BASE.parent / "components/run-engine/rbac.yaml"
    for item in yaml.safe_load_all(rights.read_text()):
        for subject in item.get("subjects", []):
            subject["namespace"] = as_flow.namespace
        as_flow.admin.create(f"{RBAC}/{as_flow.namespace}/{PLURALS[item['kind']]}", item)
    path = f"/apis/ray.io/v1/namespaces/{as_flow.namespace}/rayservices"
    as_flow.admin.create(path, manifest("engine", as_flow.namespace))
    own = manifest("own", as_flow.namespace)
    own["metadata"]["labels"]["roundhouse/run-uid"] = "0123456789ab"
    head = own["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    for field, value in (
        ("serviceAccountName", "roundhouse-flow"),
        ("volumes", [{"name": "s", "secret": {"secretName": "roundhouse-flow"}}]),
    ):
        before, head[field] = head[field], value
        with pytest.raises(ApiRefused, match=r"not the flow's to give"):
            as_flow.cluster.create(path, own)
        head[field] = before
    as_flow.cluster.create(path, own)
    assert as_flow.cluster.delete(f"{path}/own")
    with pytest.raises(ApiRefused, match="of its own run only"):
        as_flow.cluster.delete(f"{path}/engine")


def _volume(**source: Any) -> Callable[[Object], Any]:
    return lambda job: job["spec"]["template"]["spec"]["volumes"].append({"name": "more", **source})


def _container(**fields: Any) -> Callable[[Object], Any]:
    return lambda job: job["spec"]["template"]["spec"]["containers"][0].update(fields)


def _pod_field(**fields: Any) -> Callable[[Object], Any]:
    return lambda job: job["spec"]["template"]["spec"].update(fields)


def _component(name: str) -> Callable[[Object], Any]:
    return lambda job: job["spec"]["template"]["metadata"]["labels"].update({"app.kubernetes.io/component": name})


KEY = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "roundhouse-flow", "key": "ROUNDHOUSE_ENGINE_TOKEN"}}}
FROM_FLOW = [{"secretRef": {"name": "roundhouse-flow"}}]


def test_the_flows_jobs_use_no_account_secret_claim_or_label_but_their_own(as_flow: Stand) -> None:
    assert refusal(as_flow, lambda job: None) == ""
    pod = {"restartPolicy": "Never", "serviceAccountName": "any", "containers": [{"name": "c", "image": "i"}]}
    strangers = {"metadata": {"name": "stranger"}, "spec": {"template": {"metadata": {}, "spec": pod}}}
    for namespace in ("default", as_flow.namespace):
        as_flow.admin.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", strangers, dry_run=True)
    for change, words in (
        (_pod_field(serviceAccountName="roundhouse-engine-head"), "may not use the account roundhouse-engine-head"),
        (_pod_field(serviceAccountName="roundhouse-flow"), "may not use the account roundhouse-flow"),
        (_pod_field(automountServiceAccountToken=True), "may not mount a token"),
        (_component("flow"), "this label app.kubernetes.io/component"),
        (_component("store"), "this label app.kubernetes.io/component"),
        (_container(envFrom=FROM_FLOW), "flow.secrets"),
        (_container(env=[KEY]), "flow.secrets"),
        (_pod_field(initContainers=[{"name": "i", "image": "i", "envFrom": FROM_FLOW}]), "flow.secrets"),
        (_volume(secret={"secretName": "roundhouse-flow"}), "may not mount this volume"),
        (_volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}), "may not mount this volume"),
        (_volume(projected={"sources": [{"secret": {"name": "roundhouse-flow"}}]}), "may not mount this volume"),
        (_volume(persistentVolumeClaim={"claimName": "data-roundhouse-postgres-0"}), "may not mount this volume"),
        (_volume(hostPath={"path": "/"}), "may not mount this volume"),
    ):
        assert words in refusal(as_flow, change), words
    gym = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "gym-run-config", "key": "calc"}}}
    assert refusal(as_flow, _container(env=[gym])) == "", "what the flow made itself"


def test_the_flows_account_makes_and_deletes_the_secrets_of_its_gym_and_no_others(as_flow: Stand) -> None:
    path = f"/api/v1/namespaces/{as_flow.namespace}/secrets"
    own = {"metadata": {"name": "gym-run-config", "labels": {"roundhouse/run-uid": "0123456789ab"}}}
    as_flow.cluster.create(path, own)
    assert as_flow.cluster.delete(f"{path}/gym-run-config")
    token = {"annotations": {"kubernetes.io/service-account.name": "roundhouse-engine-head"}}
    of_account = {"type": "kubernetes.io/service-account-token", "metadata": own["metadata"] | token}
    as_flow.admin.create(path, {"metadata": {"name": "roundhouse-store"}})
    for attempt in (
        lambda: as_flow.cluster.delete(f"{path}/roundhouse-store"),
        lambda: as_flow.cluster.create(path, of_account),
        lambda: as_flow.cluster.create(path, {"metadata": own["metadata"] | {"name": "roundhouse-mlflow"}}),
        lambda: as_flow.cluster.create(path, {"metadata": {"name": "gym-run-config"}}),
    ):
        with pytest.raises(ApiRefused, match="roundhouse-secrets"):
            attempt()


def test_the_flows_account_may_not_do_what_a_run_does_not_do(as_flow: Stand) -> None:
    inside, cluster = f"/api/v1/namespaces/{as_flow.namespace}", as_flow.cluster
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    job = {"metadata": {"name": "j"}}
    for attempt in (
        lambda: cluster.get(f"{inside}/secrets"),
        lambda: cluster.create(f"{inside}/pods", pod),
        lambda: cluster.delete(f"{inside}/pods/p"),
        lambda: cluster.get(f"{inside}/pods/p/exec", command="sh"),
        lambda: cluster.patch(f"/apis/batch/v1/namespaces/{as_flow.namespace}/jobs/j", job),
        lambda: cluster.get("/apis/batch/v1/namespaces/default/jobs"),
        lambda: cluster.create(f"{RBAC}/{as_flow.namespace}/roles", {"metadata": {"name": "r"}}),
        lambda: cluster.get("/api/v1/nodes"),
    ):
        with pytest.raises(ApiRefused, match="403 Forbidden"):
            attempt()


def statuses(stand: Stand, monkeypatch: pytest.MonkeyPatch, **infra: Any) -> dict[str, Any]:
    monkeypatch.setenv("KUBECONFIG", str(stand.kubeconfig))
    settings = KubernetesInfra.model_validate({"namespace": stand.namespace, **infra})
    return {finding.name: finding for finding in checks.cluster(settings)}


def test_the_doctor_finds_what_is_missing_on_a_cluster_and_says_what_to_do(
    as_flow: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = statuses(as_flow, monkeypatch)
    assert found["cluster"].status == "ok"
    assert found["rights"].status == "ok"
    assert "exactly" in found["rights"].detail
    assert found["job"].status == "ok"
    assert as_flow.found("jobs") == [], "a dry run"

    role = f"{RBAC}/{as_flow.namespace}/roles/roundhouse-flow"
    rules = [rule for rule in as_flow.admin.get(role)["rules"] if rule["resources"] != ["events"]]
    as_flow.admin.patch(role, {"rules": [*rules, {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]})
    found = statuses(as_flow, monkeypatch, queue="team", trainer={"gpus": 1}, secret="s3")
    assert "list events" in found["rights"].detail
    assert "rbac.yaml" in found["rights"].remedy
    assert (found["queue"].status, found["gpus"].status, found["secrets"].status) == ("fail", "warn", "fail")
    found = statuses(as_flow, monkeypatch, collector={"secret": "gym-keys"})
    assert "infra.collector.secret: " in found["secrets"].detail
    assert "infra.collector.service_account: " in found["serviceaccounts"].detail
    as_flow.admin.patch(role, {"rules": [*rules, {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]})
    found = statuses(as_flow, monkeypatch)
    assert found["rights"].status == "warn"
    assert "create pods/exec" in found["rights"].detail


def _pod(kind: str, **container: Any) -> Object:
    state = {"name": "autoscaler", "ready": True, "restartCount": 0, "state": {"running": {}}} | container
    conditions = [{"type": "Ready", "status": str(state["ready"])}]
    labels = {"ray.io/node-type": kind}
    return {
        "metadata": {"name": f"e-{kind}", "labels": labels},
        "status": {"conditions": conditions, "containerStatuses": [state]},
    }


LOOPING = {
    "ready": False,
    "restartCount": 4,
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 1m20s"}},
    "lastState": {"terminated": {"reason": "Error", "exitCode": 1}},
}
BETWEEN_RESTARTS = LOOPING | {"state": {"running": {}}}


@pytest.mark.parametrize(
    ("ready", "application", "pods", "status", "words"),
    [
        ("True", "policy", [_pod("head")], "ok", "is Ready and serves run mine"),
        ("False", "policy", [_pod("head")], "warn", "is not Ready (Why: because)"),
        ("False", None, [_pod("head")], "ok", "a head that is ready, no replicas"),
        ("False", None, [_pod("head", ready=False)], "warn", "is not Ready"),
        ("False", None, [], "warn", "is not Ready"),
        (
            "False",
            None,
            [_pod("head", **LOOPING)],
            "fail",
            "container autoscaler of pod e-head: CrashLoopBackOff, exit",
        ),
        ("False", None, [_pod("head", **BETWEEN_RESTARTS)], "fail", "exit code 1, 4 restarts"),
        ("True", "policy", [_pod("head"), _pod("worker", **LOOPING)], "fail", "of pod e-worker"),
        (None, None, [], "warn", "no operator has reported"),
    ],
)
def test_the_doctor_reads_the_condition_ready_and_the_containers_of_an_engine(
    ready: str | None, application: str | None, pods: list[Object], status: str, words: str
) -> None:
    service: Object = {
        "metadata": {"name": "e", "annotations": {"roundhouse/run": "mine"}},
        "spec": {"serveConfigV2": yaml.safe_dump({"applications": [{"name": application}] if application else []})},
    }
    if ready is not None:
        condition = {"type": "Ready", "status": ready, "reason": "Why", "message": "because"}
        service["status"] = {"conditions": [condition]}
    finding = checks.engine_state(service, pods, "team-a")
    assert (finding.status, words in finding.detail) == (status, True), finding
    if status == "fail":
        assert finding.remedy.startswith("kubectl -n team-a logs e-")


@pytest.mark.parametrize(
    ("active", "status", "words"),
    [
        ("True", "ok", "LocalQueue training in team-a is active"),
        ("False", "fail", "admits nothing (ClusterQueueDoesNotExist: no roundhouse)"),
        (None, "warn", "no condition Active"),
        ("absent", "fail", "infra.queue: training does not exist in team-a"),
    ],
)
def test_the_doctor_looks_up_the_queue_and_the_priority_that_a_configuration_names(
    active: str | None, status: str, words: str
) -> None:
    names = {"namespace": "team-a", "queue": "training", "queue_priority": "urgent"}
    infra = KubernetesInfra.model_validate(names)
    with api_server() as (url, state):
        cluster = Cluster(ApiClient(Configuration(host=url)))
        [finding] = checks.queue(cluster, infra)
        assert "Kueue is not installed" in finding.detail
        state.groups["kueue.x-k8s.io"] = "v1beta2"
        condition = {
            "type": "Active",
            "status": active,
            "reason": "ClusterQueueDoesNotExist",
            "message": "no roundhouse",
        }
        item = {"metadata": {"name": "training"}, "status": {"conditions": [condition] if active else []}}
        if active != "absent":
            state.create("localqueues", "team-a", item)
        queue, priority = checks.queue(cluster, infra)
        assert (queue.status, words in queue.detail, priority.status) == (status, True, "fail"), queue
        assert "infra.queue_priority: urgent does not exist" in priority.detail
        state.create("workloadpriorityclasses", "", {"metadata": {"name": "urgent"}})
        assert checks.queue(cluster, infra)[1].status == "ok"
        cluster.close()


def test_the_doctor_ends_where_no_cluster_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roundhouse.cli import app

    kubeconfig = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    told = CliRunner().invoke(app, ["doctor", "--kubernetes"])
    assert told.exit_code == 1
    assert "KUBECONFIG" in told.output
    cluster = {"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
    tree = {"clusters": [cluster], "contexts": [context], "users": [{"name": "x", "user": {}}], "current-context": "x"}
    kubeconfig.write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 0.5)
    told = CliRunner().invoke(app, ["doctor", "--kubernetes", "--json"])
    assert told.exit_code == 1
    assert "127.0.0.1:9" in told.output
