"""The flow's account: what a run does is allowed, what it does not do is refused; and what the doctor says of both.

Before a real API server, with a token of the real service account.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.models import GenerationConfig
from roundhouse.errors import DataError
from roundhouse.infra.checks import kubernetes as checks
from roundhouse.infra.kubernetes.cluster import ApiRefused
from roundhouse.infra.kubernetes.job import Unwanted
from roundhouse.infra.kubernetes.rayservice import RayServiceServed, ServedRun
from roundhouse.infra.kubernetes.stage_jobs import PLACE
from tests.k8s.control_plane import ControlPlane
from tests.k8s.kuberay import FakeServe, Operator, answering, install_crd
from tests.k8s.stand import Stand, cluster_of, real_stand
from tests.k8s.test_rayservice import manifest
from tests.k8s.test_shard_jobs import plan as shard_plan

Object = dict[str, Any]

BASE = Path(__file__).parents[2] / "k8s/base"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces"


def install(stand: Stand, *files: str) -> None:
    plurals = {"Role": "roles", "RoleBinding": "rolebindings", "ServiceAccount": "serviceaccounts"}
    for file in files:
        for item in yaml.safe_load_all((BASE / file).read_text()):
            for subject in item.get("subjects", []):
                subject["namespace"] = stand.namespace
            prefix = f"/apis/{item['apiVersion']}" if "/" in item["apiVersion"] else f"/api/{item['apiVersion']}"
            stand.admin.create(f"{prefix}/namespaces/{stand.namespace}/{plurals[item['kind']]}", item)


@pytest.fixture
def as_flow(plane: ControlPlane, tmp_path: Path) -> Iterator[Stand]:
    """A stand whose code under test is the service account roundhouse-flow."""
    if not plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS has no kube-controller-manager: nobody makes pods of Jobs")
    with real_stand(plane) as stand:
        install(stand, "accounts.yaml", "rbac.yaml")
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
        yield stand


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
