"""Every manifest is valid, restricted, and as a real API server takes it."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.loading import load_config, parse_config
from roundhouse.config.training import ProcessService
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob, gym_secret
from roundhouse.store.location import Location
from roundhouse.training.service.job_entry import RANKS_MEET_BY_FILE, torchrun
from tests.k8s.validation import (
    CRDS,
    OVERLAYS,
    ROOT,
    pod_specs,
    pods_as_made,
    problems,
    rendered,
    rendered_at,
    unrestricted,
    with_kubectl,
    written,
)
from tests.plugins.kubernetes.control_plane import ControlPlane
from tests.plugins.kubernetes.kuberay import install_crd
from tests.plugins.kubernetes.stand import cluster_of
from tests.plugins.kubernetes.test_pod_settings import gym_job
from tests.plugins.kubernetes.test_shard_jobs import manifest as shard_manifest

Object = dict[str, Any]

with_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason="needs KubeRay's CRDs in shared/kuberay-crds beside the repository"
)


def train_job(**trainer: Any) -> TrainJob:
    infra = KubernetesInfra.model_validate(
        {
            "trainer": {"gpus": 8, "pods": 2, "priority_class": "roundhouse-trainer", "node_selector": {"gpu": "h100"}}
            | trainer,
            "secret": "roundhouse-store",
            "queue": "team",
            "environment": {"AWS_REGION": "eu-central-1"},
            "store_claim": "store",
        }
    )
    identity = StageIdentity("run", "0123456789ab", 1, "train", "89abcdef0123")
    return TrainJob(identity, infra, ProcessService(processes=8), reports="file:///store/r", store="file:///store")


def train_manifests(**trainer: Any) -> list[Object]:
    plan = train_job(**trainer)
    owner = plan.run_object() | {}
    owner = {**owner, "metadata": owner["metadata"] | {"uid": "11111111-1111-1111-1111-111111111111"}}
    return [plan.run_object(), *filter(None, [plan.run_service(owner)]), plan.job(1, owner)]


def test_ranks_of_one_pod_meet_in_it() -> None:
    [container] = [spec["containers"][0] for _, spec in pod_specs(train_manifests(pods=1)[-1])]
    with_ranks = container["args"][: container["args"].index("roundhouse.training.service.one_shot")]
    assert with_ranks == [*torchrun(8, "/scratch/meeting"), "-m"]
    [meeting] = [item["value"] for item in container["env"] if item["name"] in RANKS_MEET_BY_FILE]
    assert meeting == "1"
    [container] = [spec["containers"][0] for _, spec in pod_specs(train_manifests()[-1])]
    assert "--master-addr" in container["args"]
    assert not RANKS_MEET_BY_FILE.keys() & {item["name"] for item in container["env"]}


def gym_manifests() -> list[Object]:
    """A model server of a run's own NeMo Gym."""
    job = replace(gym_job(), role="responses_api_models")
    owner = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "uid": "11111111-1111-1111-1111-111111111111"},
    }
    return [job.job(1, owner), job.service(owner), gym_secret("a", job, owner, {"a": "b: 1"})]


def test_every_manifest_of_the_tree_is_valid_by_itself() -> None:
    for file, item in written():
        if item["apiVersion"].startswith("ray.io/") and not CRDS.is_dir():
            continue
        assert problems(item) == [], file


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_rendered_manifest_is_valid_and_restricted(overlay: str) -> None:
    items = rendered(overlay)
    for item in items:
        if not item["apiVersion"].startswith("ray.io/") or CRDS.is_dir():
            assert problems(item) == []
        for path, spec in pod_specs(item):
            assert unrestricted(spec) == [], f"{item['metadata']['name']}{path}"
    accounts = {item["metadata"]["name"] for item in items if item["kind"] == "ServiceAccount"}
    classes = {item["metadata"]["name"] for item in items if item["kind"] == "PriorityClass"}
    for item in items:
        for _, spec in pod_specs(item):
            assert spec["serviceAccountName"] in accounts
            assert spec["priorityClassName"] in classes


@with_kubectl
def test_the_ray_head_as_made_by_kuberay_is_restricted_and_alone_has_a_token() -> None:
    """KubeRay binds its autoscaler's Role, which adds and deletes pods, to the head's account."""
    items = rendered("gpu")
    cluster = next(item for item in items if item["kind"] == "RayService")["spec"]["rayClusterConfig"]
    pods = pods_as_made(cluster)
    assert [container["name"] for container in pods["head"]["containers"]] == ["ray", "autoscaler"]
    assert {name: unrestricted(spec) for name, spec in pods.items()} == {"head": [], "gpu": []}
    assert {name: spec["automountServiceAccountToken"] for name, spec in pods.items()} == {"head": True, "gpu": False}
    users = [spec for item in items for _, spec in pod_specs(item)]
    assert [spec["serviceAccountName"] for spec in users].count(pods["head"]["serviceAccountName"]) == 1
    assert cluster["authOptions"] == {"mode": "token"}, "whoever reaches the dashboard runs code on the GPUs"
    for spec in pods.values():
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert all(mount["name"] in volumes for item in spec["containers"] for mount in item["volumeMounts"])


@with_kubectl
def test_the_autoscaler_can_write_to_the_session_directory_of_rays_head() -> None:
    """It takes the directory from the head: below the head's TMPDIR, else that of the image."""
    cluster = next(item for item in rendered("gpu") if item["kind"] == "RayService")["spec"]["rayClusterConfig"]
    head, autoscaler = pods_as_made(cluster)["head"]["containers"]
    image = re.search(r"^ +TMPDIR=(\S+)", (ROOT / "images/Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    directory = {item["name"]: item.get("value") for item in head["env"]}.get("TMPDIR", image[1])
    volumes = {mount["mountPath"]: mount["name"] for mount in head["volumeMounts"]}
    assert {"name": volumes[directory], "mountPath": directory} in autoscaler["volumeMounts"]


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_policy_believes_a_label_of_any_namespace_and_code_of_a_policy_cannot_call_out(overlay: str) -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in rendered(overlay) if item["kind"] == "NetworkPolicy"}
    for name, spec in policies.items():
        sources = [source for rule in spec.get("ingress", []) for source in rule["from"]]
        assert all(source.get("namespaceSelector") != {} for source in sources), name
    assert policies["nobody-by-default"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for component in ("gym", "collector"):
        [rules] = [
            spec["egress"]
            for spec in policies.values()
            if "Egress" in spec["policyTypes"]
            and spec["podSelector"].get("matchLabels") == {"app.kubernetes.io/component": component}
        ]
        peers = [peer for rule in rules for peer in rule["to"]]
        assert all(peer.get("ipBlock", {}).get("except") for peer in peers if "ipBlock" in peer)
        assert all("port" in port for rule in rules for port in rule.get("ports", []))


DNS = (
    "k8s-app: kube-dns",
    "169.254.20.10/32",
    "169.254.169.254/32",
    "dns.operator.openshift.io/daemonset-dns: default",
)


@with_kubectl
def test_every_role_has_names_by_every_clusters_dns_and_an_egress_of_its_own(tmp_path: Path) -> None:
    k8s = Path(os.path.relpath(ROOT / "k8s", tmp_path.resolve()))
    components = [str(k8s / "components" / name) for name in ("train-server", "services")]
    tree = {"resources": [str(k8s / "overlays/gpu")], "components": components}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    items = rendered_at(tmp_path)
    policies = {item["metadata"]["name"]: item["spec"] for item in items if item["kind"] == "NetworkPolicy"}
    names = policies.pop("names-for-all")
    assert all(text in yaml.safe_dump(names) for text in DNS)
    assert all({port["port"] for port in rule["ports"]} <= {53, 5353} for rule in names["egress"]), "no metadata"
    policies.pop("nobody-by-default")
    assert not [name for name, spec in policies.items() if "kube-dns" in yaml.safe_dump(spec)], "in one place"
    with_egress = {
        spec["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component")
        for spec in policies.values()
        if "Egress" in spec["policyTypes"]
    }
    labels = [item.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {}) for item in items]
    roles = {each["app.kubernetes.io/component"] for each in labels if "app.kubernetes.io/component" in each}
    assert roles | {"engine", "trainer", "collector"} <= with_egress


@with_kubectl
def test_kuberays_operator_is_let_in_by_the_labels_of_its_chart_and_of_its_kustomization() -> None:
    [spec] = [item["spec"] for item in rendered("gpu") if item["metadata"]["name"] == "engine-from-kuberay"]
    [peer] = spec["ingress"][0]["from"]
    [names], [places] = (peer[kind]["matchExpressions"] for kind in ("podSelector", "namespaceSelector"))
    assert set(names["values"]) == {"kuberay-operator", "kuberay"}
    assert set(places["values"]) == {"kuberay-system", "default"}


@with_kubectl
def test_every_pod_asks_for_the_disk_that_it_fills() -> None:
    """Without a request, a scheduler places pods of 500 Gi on nodes without the space, and the node evicts others."""
    specs = [spec for overlay in OVERLAYS for item in rendered(overlay) for _, spec in pod_specs(item)]
    specs += [spec for item in [*train_manifests(), shard_manifest(), *gym_manifests()] for _, spec in pod_specs(item)]
    for spec in specs:
        main = spec["containers"][0]
        assert "ephemeral-storage" in main["resources"]["requests"], main["name"]
    [trainer] = [spec["containers"][0] for _, spec in pod_specs(train_manifests(scratch="500Gi")[-1])]
    assert trainer["resources"]["requests"]["ephemeral-storage"] == "500Gi"


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("starter", ["flow-job", "work-pool"])
def test_an_overlay_in_another_namespace_has_no_address_in_this_one(overlay: str, starter: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    file = tmp_path / "k8s/overlays" / overlay / "kustomization.yaml"
    text = file.read_text().replace("../../components/flow-job #", f"../../components/{starter} #")
    tree = yaml.safe_load(text.replace("namespace: roundhouse", "namespace: team-a"))
    tree["components"] += [
        f"../../components/{name}" for name in ("services", "services-ingress", "train-server", "kueue")
    ]
    file.write_text(yaml.safe_dump(tree))
    items = rendered_at(file.parent)
    assert {item["metadata"].get("namespace") for item in items if _has_namespace(item)} == {"team-a"}
    for item in items:
        assert not re.search(r"roundhouse\.svc|namespace: roundhouse\b", yaml.safe_dump(item)), item["metadata"]["name"]


def _has_namespace(item: Object) -> bool:
    return item["kind"] not in _CLUSTER_WIDE


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_thing_starts_runs_the_job_or_the_work_pools_worker(overlay: str, tmp_path: Path) -> None:
    def starters(items: list[Object]) -> set[tuple[str, str]]:
        names = {_key(item) for item in items}
        return names & {("Job", "roundhouse-flow"), ("Deployment", "roundhouse-worker")}

    assert starters(rendered(overlay)) == {("Job", "roundhouse-flow")}
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    file = tmp_path / "k8s/overlays" / overlay / "kustomization.yaml"
    file.write_text(file.read_text().replace("../../components/flow-job #", "../../components/work-pool #"))
    pooled = rendered_at(file.parent)
    assert starters(pooled) == {("Deployment", "roundhouse-worker")}
    for item in pooled:
        for path, spec in pod_specs(item):
            assert unrestricted(spec) == [], f"{item['metadata']['name']}{path}"


def test_a_cache_claim_is_mounted_in_the_training_pods_and_asks_for_no_directory_of_the_node() -> None:
    for pods in (1, 2):
        manifests = train_manifests(cache_claim="roundhouse-cache", pods=pods)
        assert [problems(item) for item in manifests] == [[]] * len(manifests)
        spec = manifests[-1]["spec"]["template"]["spec"]
        assert unrestricted(spec) == [], "hostPath would be one"
        [volume] = [volume for volume in spec["volumes"] if volume["name"] == "cache"]
        assert volume["persistentVolumeClaim"] == {"claimName": "roundhouse-cache"}
        assert {"name": "cache", "mountPath": "/cache"} in spec["containers"][0]["volumeMounts"]


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_selects_a_pod(overlay: str) -> None:
    """A Service, policy or budget with a misspelt selector is valid and does nothing."""
    items = rendered(overlay)
    labels = [
        template["metadata"]["labels"] for item in items for template in _templates(item) if template.get("metadata")
    ] + [
        train_job().job(1, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "uid": "b"}})[
            "metadata"
        ]["labels"],
        shard_manifest()["metadata"]["labels"],
        *(item["metadata"]["labels"] for item in gym_manifests()),
        {"app.kubernetes.io/component": "engine", "ray.io/node-type": "head"},  # as KubeRay labels the head
    ]
    for item in items:
        spec = item.get("spec", {})
        wanted = {
            "Service": spec.get("selector"),
            "NetworkPolicy": (spec.get("podSelector") or {}).get("matchLabels"),
            "PodDisruptionBudget": (spec.get("selector") or {}).get("matchLabels"),
            "Deployment": (spec.get("selector") or {}).get("matchLabels"),
        }.get(item["kind"])
        if wanted:
            assert any(wanted.items() <= has.items() for has in labels), item["metadata"]["name"]


def test_the_gym_prefers_the_node_of_an_engine_else_its_zone() -> None:
    manifests = yaml.safe_load_all((Path(__file__).parents[3] / "k8s/base/gym.yaml").read_text())
    [gym] = [each["spec"]["template"]["spec"] for each in manifests if each["kind"] == "Deployment"]
    terms = gym["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    keys = [term["podAffinityTerm"]["topologyKey"] for term in terms]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    labels = [term["podAffinityTerm"]["labelSelector"]["matchLabels"] for term in terms]
    assert labels == [{"ray.io/node-type": "worker"}] * 2


@pytest.mark.parametrize("trainer", [{}, {"pods": 1, "gpus": 0, "node_selector": {}}])
def test_the_manifests_of_a_training_step_are_valid_and_restricted(trainer: Object) -> None:
    for item in train_manifests(**trainer):
        assert problems(item) == []
        for _, spec in pod_specs(item):
            assert unrestricted(spec) == []
            assert spec["automountServiceAccountToken"] is False


def test_the_lines_of_a_trainers_log_say_what_they_are_about() -> None:
    [container] = train_manifests()[-1]["spec"]["template"]["spec"]["containers"]
    given = {item["name"]: item.get("value") for item in container["env"]}
    assert json.loads(given["ROUNDHOUSE_LOG_LABELS"]) == {"run": "run", "iteration": 1, "stage": "train"}


def test_the_configurations_in_the_overlays_load(tmp_path: Path) -> None:
    for overlay in OVERLAYS:
        file = ROOT / "k8s/overlays" / overlay / "run.yaml"
        (tmp_path / "run.yaml").write_text(yaml.safe_load(file.read_text())["data"]["run.yaml"])
        config = load_config(tmp_path / "run.yaml")
        assert config.infra.kind == "kubernetes"


@with_kubectl
def test_one_secret_gives_every_pod_of_the_bucket_overlay_the_store_and_none_has_a_claim() -> None:
    items = rendered("bucket")
    assert [item for item in items if item["kind"] == "PersistentVolumeClaim"] == []
    [run] = [yaml.safe_load(item["data"]["run.yaml"]) for item in items if item["metadata"]["name"] == "roundhouse-run"]
    assert run["store"].startswith("s3://")
    assert run["infra"]["secret"] == "roundhouse-store", "the trainer's"
    assert "store_claim" not in run["infra"]
    for name in ("roundhouse-flow", "roundhouse-engine"):
        [spec] = [
            spec
            for item in items
            if item["kind"] in ("Job", "Deployment") and item["metadata"]["name"] == name
            for _, spec in pod_specs(item)
        ]
        sources = spec["containers"][0]["envFrom"]
        assert {"secretRef": {"name": "roundhouse-store"}} in sources, "not optional: without it there is no store"
        assert not any("persistentVolumeClaim" in volume for volume in spec["volumes"])
    written = [item for item in items if item["kind"] == "Secret"]
    assert written == [], "keys are nobody's manifest"
    config = parse_config(run)
    assert Location(config.store).uri == "s3://roundhouse"


@with_kubectl
def test_each_worker_of_an_engine_is_queued_and_the_engine_itself_is_not(tmp_path: Path) -> None:
    """KubeRay hands `suspend` to a Ray cluster only when it makes one: a queued RayService that is preempted keeps its GPUs."""
    k8s = Path(os.path.relpath(Path(__file__).parents[3] / "k8s", tmp_path.resolve()))
    tree = {"resources": [str(k8s / "overlays/gpu")], "components": [str(k8s / "components/kueue")]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    queued, plain = ({_key(item): item for item in items} for items in (rendered_at(tmp_path), rendered("gpu")))
    assert {key for key in plain if queued[key] != plain[key]} == {("RayService", "roundhouse-engine")}
    assert queued.keys() - plain.keys() == {("LocalQueue", "engines"), ("LocalQueue", "training")}
    queues = {_key(each): each for each in yaml.safe_load_all((ROOT / "k8s/components/kueue/queues.yaml").read_text())}
    engine = queued["RayService", "roundhouse-engine"]
    [workers] = engine["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    labels = workers["template"]["metadata"]["labels"]
    assert ("LocalQueue", labels.pop("kueue.x-k8s.io/queue-name")) in queued
    assert ("WorkloadPriorityClass", labels.pop("kueue.x-k8s.io/priority-class")) in queues
    assert engine == plain["RayService", "roundhouse-engine"]
    assert queued["LocalQueue", "engines"]["spec"] == {"clusterQueue": "roundhouse"}
    selected = queues["ClusterQueue", "roundhouse"]["spec"]["namespaceSelector"]["matchLabels"]
    [space] = [item for (kind, _), item in queued.items() if kind == "Namespace"]
    assert selected.items() <= space["metadata"]["labels"].items(), "whatever its name"


def test_no_pod_is_preempted_for_a_run_whose_own_pods_keep_their_order() -> None:
    classes = list(yaml.safe_load_all((ROOT / "k8s/base/priorities.yaml").read_text()))
    assert {item["preemptionPolicy"] for item in classes} == {"Never"}
    names = [
        item["metadata"]["name"].removeprefix("roundhouse-") for item in sorted(classes, key=lambda c: -c["value"])
    ]
    assert names == ["flow", "engine", "trainer", "gym", "collector"]
    assert all(0 <= item["value"] < 10 for item in classes), "beside pods without a class, which have 0"


@with_kubectl
def test_a_train_server_adds_a_pod_with_a_gpu_for_each_of_its_ranks_that_the_flow_alone_reaches(tmp_path: Path) -> None:
    k8s = Path(os.path.relpath(ROOT / "k8s", tmp_path.resolve()))
    tree = {"resources": [str(k8s / "overlays/gpu")], "components": [str(k8s / "components/train-server")]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    without = {_key(item) for item in rendered("gpu")}
    added = {item["kind"]: item for item in rendered_at(tmp_path) if _key(item) not in without}
    assert {kind: problems(item) for kind, item in added.items()} == {
        "Deployment": [], "Service": [], "NetworkPolicy": [],
    }  # fmt: skip
    template = added["Deployment"]["spec"]["template"]
    assert unrestricted(template["spec"]) == []
    [server] = template["spec"]["containers"]
    options = dict(zip(server["args"][1::2], server["args"][2::2], strict=True))
    assert server["resources"]["limits"]["nvidia.com/gpu"] == options["--processes"]
    assert "NCCL_SOCKET_IFNAME" not in {item["name"] for item in server["env"]}, "it would hold for transfers too"
    assert added["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    rules = added["NetworkPolicy"]["spec"]
    assert rules["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    [[source]] = [rule["from"] for rule in rules["ingress"]]
    assert source == {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "flow"}}}


def _key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def test_planted_mistakes_are_found() -> None:
    """The checks above can fail."""
    job = train_manifests()[-1]
    spec = job["spec"]["template"]["spec"]
    container = spec["containers"][0]

    def broken(change: Any) -> list[str]:
        copy = yaml.safe_load(yaml.safe_dump(job))
        change(copy["spec"]["template"]["spec"])
        return problems(copy)

    assert any("Always'" in line for line in broken(lambda pod: pod.update(restartPolicy="Always'")))
    assert any(
        "64GiB" in line
        for line in broken(lambda pod: pod["containers"][0]["resources"]["limits"].update(memory="64GiB"))
    )
    assert broken(lambda pod: pod.update(restartPolicys="Never"))
    assert broken(lambda pod: pod["containers"][0].pop("name"))
    assert unrestricted({**spec, "securityContext": {}})
    assert unrestricted({**spec, "containers": [{**container, "securityContext": {}}]})


def _templates(item: Any) -> list[Object]:
    found: list[Object] = []
    if isinstance(item, dict):
        if isinstance(item.get("template"), dict):
            found.append(item["template"])
        found += [template for value in item.values() for template in _templates(value)]
    elif isinstance(item, list):
        found += [template for value in item for template in _templates(value)]
    return found


_PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}
_CLUSTER_WIDE = ("Namespace", "PriorityClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


def _path(item: Object) -> str:
    prefix = "/apis/" if "/" in item["apiVersion"] else "/api/"
    namespace = item["metadata"].get("namespace")
    inside = "" if item["kind"] in _CLUSTER_WIDE else f"/namespaces/{namespace}"
    return f"{prefix}{item['apiVersion']}{inside}/{_PLURALS.get(item['kind'], item['kind'].lower() + 's')}"


def dry_run(admin: Cluster, item: Object) -> None:
    admin._json("POST", _path(item), {"dryRun": "All", "fieldValidation": "Strict"}, item)


@pytest.fixture(scope="session")
def installed(plane: ControlPlane) -> Cluster:
    """The administrator of a real API server that has the namespace and KubeRay's RayService."""
    admin = cluster_of(plane.kubeconfig())
    base = Path(__file__).parents[3] / "k8s/base"
    for file in ("namespace.yaml", "priorities.yaml", "accounts.yaml"):
        for item in yaml.safe_load_all((base / file).read_text()):
            item["metadata"].setdefault("namespace", "roundhouse")
            with suppress(ApiRefused) if item["kind"] in _CLUSTER_WIDE else nullcontext():  # there from another test
                admin.create(_path(item), item)
    if CRDS.is_dir():
        install_crd(admin)
    return admin


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_real_api_server_takes_every_manifest_of_an_overlay(overlay: str, installed: Cluster) -> None:
    for item in rendered(overlay):
        if item["kind"] in ("Namespace", "PriorityClass", "ServiceAccount"):
            continue  # there already: written for good by the fixture
        if item["apiVersion"].startswith("ray.io/") and not CRDS.is_dir():
            continue
        try:
            dry_run(installed, item)
        except ApiRefused as refused:  # valid, and there from another test
            if refused.reason != "AlreadyExists" or item["kind"] not in _CLUSTER_WIDE:
                raise


def test_a_real_api_server_takes_the_manifests_of_steps_shards_and_gym_servers(installed: Cluster) -> None:
    for item in [*train_manifests(), shard_manifest(), *gym_manifests()]:
        dry_run(installed, item)


@with_kubectl
def test_pod_security_takes_every_pod_and_refuses_one_that_may_be_root(installed: Cluster) -> None:
    """`restricted` is enforced where a pod is made; templates only get a warning. So each template is made a pod."""
    specs = [spec for overlay in OVERLAYS for item in rendered(overlay) for _, spec in pod_specs(item)]
    specs += [spec for item in [*train_manifests(), shard_manifest(), *gym_manifests()] for _, spec in pod_specs(item)]
    assert len(specs) >= 7
    pod: Object = {}
    for spec in specs:
        for container in spec["containers"]:
            container.setdefault("image", "x")
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "roundhouse"}, "spec": spec}
        dry_run(installed, pod)
    pod["spec"] = {**pod["spec"], "securityContext": {}}
    with pytest.raises(ApiRefused, match=r'403 Forbidden.*violates PodSecurity "restricted'):
        dry_run(installed, pod)


def test_the_store_of_the_kind_overlay_is_where_every_pod_has_the_claim() -> None:
    """The trainer's pods have it at the store's path; a store below the claim's path would be another directory there."""
    run = yaml.safe_load((ROOT / "k8s/overlays/kind/run.yaml").read_text())["data"]["run.yaml"]
    store = yaml.safe_load(run)["store"]
    patches = yaml.safe_load((ROOT / "k8s/overlays/kind/flow-store.yaml").read_text())
    mounts = [patch["value"]["mountPath"] for patch in patches if patch["path"].endswith("/volumeMounts/-")]
    patches = yaml.safe_load((ROOT / "k8s/overlays/kind/engine-store.yaml").read_text())
    mounts += [patch["value"]["mountPath"] for patch in patches if patch["path"].endswith("/volumeMounts/-")]
    assert mounts == [store, store]
