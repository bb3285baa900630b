"""Flow runs as Jobs: the work pool's template, Prefect's Job from it, and Prefect's worker with a real API server.

The worker is Prefect's own (package prefect-kubernetes), which is not in this environment: ROUNDHOUSE_WORKER_PYTHON names
the interpreter of an environment with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import yaml

from roundhouse.config.deployments import JobTemplate, read_deployments, read_template
from roundhouse.config.loading import load_config
from roundhouse.plugins.kubernetes.cluster import ApiRefused, Cluster
from tests.k8s.validation import pod_specs, problems, rendered_at, unrestricted, with_kubectl
from tests.plugins.kubernetes.control_plane import ControlPlane
from tests.plugins.kubernetes.players import Kubelet, run_container
from tests.plugins.kubernetes.stand import Stand, cluster_of, real_stand
from tests.plugins.kubernetes.test_flow_job import end
from tests.plugins.kubernetes.test_manifests import dry_run
from tests.plugins.kubernetes.test_rights import install as install_base
from tests.waiting import until

Object = dict[str, Any]

ROOT = Path(__file__).parents[3]
POOL = ROOT / "k8s/components/work-pool"
NOT_OF_A_POD = ("parallelism", "completions")
"""What Prefect's worker insists on and the API server drops."""


@pytest.fixture
def template() -> JobTemplate:
    return read_template(POOL / "base-job-template.yaml")


def job_of(template: JobTemplate, **variables: Any) -> Object:
    """The template's Job with these job variables, resolved by Prefect, and finished as its worker finishes it."""
    from prefect.utilities.templating import apply_values

    template.refuse_unknown(variables, "test")
    known = template.variables["properties"]
    values = {name: each["default"] for name, each in known.items() if "default" in each} | variables
    configuration = apply_values(template.model_dump()["job_configuration"], values)
    job = configuration["job_manifest"]
    pod = job["spec"]["template"]["spec"]
    environment = configuration["env"] | variables.get("env", {})
    job["metadata"]["generateName"] = "a-flow-run-"
    pod["containers"][0]["env"] = [{"name": k, "value": str(v)} for k, v in environment.items()]
    pod["containers"][0]["args"] = shlex.split(pod["containers"][0]["args"])
    for key in NOT_OF_A_POD:
        del pod[key]
    return job


VARIABLES: list[Object] = [
    {},
    {
        "image": "registry/flow@sha256:0",
        "queue": "team",
        "priority_class": "roundhouse-flow",
        "env": {"MLFLOW_TRACKING_URI": "http://mlflow"},
        "node_selector": {"pool": "cpu"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "image_pull_secrets": [{"name": "registry"}],
    },
]


@pytest.mark.parametrize("variables", VARIABLES)
def test_the_job_of_a_flow_run_is_valid_and_restricted(template: JobTemplate, variables: Object) -> None:
    job = job_of(template, **variables)
    named = {**job, "metadata": {**job["metadata"], "name": "a-flow-run-x"}}
    assert problems(named) == []
    [(_, pod)] = list(pod_specs(job))
    assert unrestricted(pod) == []
    environment = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
    assert environment["ROUNDHOUSE_PRESETS"] == "/etc/roundhouse/presets"
    assert environment.get("MLFLOW_TRACKING_URI") == variables.get("env", {}).get("MLFLOW_TRACKING_URI")
    labels = job["metadata"]["labels"]
    assert labels.get("kueue.x-k8s.io/queue-name") == variables.get("queue")
    pod_labels = job["spec"]["template"]["metadata"]["labels"]
    assert pod_labels["app.kubernetes.io/component"] == "flow", "network policies let the flow reach engine and gym"
    assert "{{" not in yaml.safe_dump(job)


@with_kubectl
def test_flow_pods_of_the_overlay_with_a_volume_mount_the_store_that_its_preset_names(
    template: JobTemplate, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    file = tmp_path / "k8s/overlays/kind/kustomization.yaml"
    tree = yaml.safe_load(file.read_text())
    tree["components"] = [f"../../components/{name}" for name in ("cpu-engine", "work-pool", "work-pool-volume")]
    file.write_text(yaml.safe_dump(tree))
    [presets] = [item for item in rendered_at(file.parent) if item["metadata"]["name"] == "roundhouse-presets"]
    assert set(presets["data"]) == {"production.yaml", "volume.yaml"}
    (tmp_path / "volume.yaml").write_text(presets["data"]["volume.yaml"])
    store = load_config(tmp_path / "volume.yaml").store
    deployments = read_deployments(ROOT / "k8s/components/work-pool-volume/prefect.yaml", template).deployments
    assert [entry.name for entry in deployments] == ["train", "collect", "evaluate"]
    for entry in deployments:
        job = job_of(template, **entry.work_pool.job_variables)
        [(_, pod)] = list(pod_specs(job))
        assert unrestricted(pod) == []
        claims = {
            each["name"]: each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert claims[mounts[store]] == {"claimName": "roundhouse-store"}


STATES = [
    ("COMPLETED", 0),
    ("FAILED", 1),
    ("CRASHED", 1),
    ("CANCELLED", 0),  # somebody wanted that
    ("PAUSED", 0),  # suspended: it goes on in another Job
    ("SCHEDULED", 0),  # planned again at SIGTERM
]


@pytest.mark.parametrize(("state", "code"), STATES)
def test_the_exit_code_of_a_flow_runs_pod_is_one_for_failed_flow_runs(
    monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    """Prefect's own command exits with 0 whatever state the flow run ended in, so no alert on failed Jobs fired."""
    import prefect.cli.flow_run
    import prefect.client.orchestration
    from prefect.client.schemas.objects import StateType

    from roundhouse_flows import flow_run_job

    client = AsyncMock()
    client.__aenter__.return_value.read_flow_run.return_value.state.type = StateType(state)
    monkeypatch.setattr(prefect.cli.flow_run, "execute", AsyncMock())
    monkeypatch.setattr(prefect.client.orchestration, "get_client", lambda: client)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "00000000-0000-0000-0000-000000000001")
    assert asyncio.run(flow_run_job.execute()) == code


def job_ended(stand: Stand, job: Object, places: dict[str, str]) -> str:
    """Run the pod's process here and return the Job controller's condition of the ended Job."""
    stand.kubelet.behave = lambda pod: run_container(stand.kubelet, pod, places)
    job = json.loads(json.dumps(job))
    job["metadata"] = {"name": "a-flow-run-x", "namespace": stand.namespace, "labels": job["metadata"]["labels"]}
    job["spec"] |= {"completions": 1, "completionMode": "Indexed", "activeDeadlineSeconds": 600}
    job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/part-of"] = "roundhouse"  # the kubelet's selector
    job["spec"]["template"]["spec"].pop("priorityClassName")
    stand.admin.create(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs", job)
    return str(end(stand, "a-flow-run-x")["type"])


@pytest.mark.long
def test_the_job_of_a_flow_run_that_fails_fails(template: JobTemplate, fake: Stand, tmp_path: Path) -> None:
    """Prefect's own command, started as the pod's, before a real server."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    (tmp_path / "two.py").write_text(
        "from prefect import flow\n\n@flow\ndef two(fails: bool):\n    if fails:\n        raise ValueError('as planned')\n"
    )
    with prefect_test_harness(server_startup_timeout=120):
        for fails, ended in ((True, "Failed"), (False, "Complete")):
            with get_client(sync_client=True) as client:
                flow_id = client.create_flow_from_name("two")
                deployment = client.create_deployment(
                    flow_id, f"two-{fails}", entrypoint="two.py:two", path=str(tmp_path), enforce_parameter_schema=False
                )
                run = client.create_flow_run_from_deployment(deployment, parameters={"fails": fails})
                places = {"PREFECT_API_URL": PREFECT_API_URL.value(), "PREFECT__FLOW_RUN_ID": str(run.id)}
                places |= {"PREFECT_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
                assert job_ended(fake, job_of(template), places) == ended
                fake.admin.delete(
                    f"/apis/batch/v1/namespaces/{fake.namespace}/jobs/a-flow-run-x", propagation="Background"
                )


@with_kubectl
def test_the_workers_manifests_are_valid_and_restricted_and_the_pool_is_the_templates(template: JobTemplate) -> None:
    items = rendered_at(POOL)
    for item in items:
        assert problems(item) == []
        for _, spec in pod_specs(item):
            assert unrestricted(spec) == []
    maps = {item["metadata"]["name"]: item["data"] for item in items if item["kind"] == "ConfigMap"}
    assert set(maps["roundhouse-presets"]) == {path.name for path in (POOL / "presets").glob("*.yaml")}
    mounted = template.variables["properties"]["volumes"]["default"]
    mapped = [volume["configMap"] for volume in mounted if "configMap" in volume]
    assert {each["name"] for each in mapped if not each.get("optional")} <= set(maps)


def test_the_presets_load() -> None:
    for file in (POOL / "presets").glob("*.yaml"):
        assert load_config(file).infra.kind == "kubernetes"


def test_a_real_api_server_takes_the_job_and_pod_security_its_pod(template: JobTemplate, plane: ControlPlane) -> None:
    admin = cluster_of(plane.kubeconfig())
    with restricted_namespace(admin) as namespace:
        for variables in VARIABLES:
            job = job_of(template, **variables, namespace=namespace)
            job["metadata"]["namespace"] = namespace
            dry_run(admin, job)
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": namespace}}
            spec = job["spec"]["template"]["spec"]
            dry_run(admin, pod | {"spec": {k: v for k, v in spec.items() if k != "priorityClassName"}})


@contextmanager
def restricted_namespace(admin: Cluster) -> Iterator[str]:
    name = f"rh-{os.urandom(4).hex()}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    admin.create("/api/v1/namespaces", body)
    try:
        yield name
    finally:
        admin.delete(f"/api/v1/namespaces/{name}", propagation="Background")


@pytest.fixture
def worker_python() -> Path:
    named = os.environ.get("ROUNDHOUSE_WORKER_PYTHON")
    if named is None:
        pytest.skip(
            "needs Prefect's Kubernetes worker: set ROUNDHOUSE_WORKER_PYTHON to an interpreter with prefect-kubernetes"
        )
    return Path(named)


@pytest.mark.timeout(1800)
def test_prefects_worker_makes_the_job_of_a_flow_run_with_its_own_rights(
    plane: ControlPlane, template: JobTemplate, worker_python: Path, tmp_path: Path
) -> None:
    """Deployed, asked for, made by the worker as service account roundhouse-worker, ended by the pod's own command."""
    from roundhouse.config.deployments import read_deployments
    from roundhouse_flows.work_pool import deploy
    from tests.flows.served import serving

    (tmp_path / "served").mkdir()
    with real_stand(plane) as stand, serving(tmp_path / "served") as served:
        token = install(stand)
        pool = {"name": "cluster", "job_variables": {"namespace": stand.namespace, "image": "roundhouse/flow:test"}}
        settings = {"preset": "small", "run_id": "on-the-cluster", "iterations": 1}
        entry = {"name": "here", "entrypoint": "roundhouse_flows.deployments.train", "work_pool": pool}
        (tmp_path / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [entry]}))
        api = f"{served.services.prefect_ui_url}/api"
        with served.at_prefect():
            list(deploy(read_deployments(tmp_path / "prefect.yaml", template), template))
        places = {
            "ROUNDHOUSE_PRESETS": str(served.directory / "presets"),
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
        }
        places |= {"ROUNDHOUSE_STATE": str(served.directory / "state"), "PREFECT_HOME": str(tmp_path / "prefect")}
        auth = {"PREFECT_API_AUTH_STRING": served.services.prefect_auth_string}
        kubelet = Kubelet(stand.admin, stand.namespace, selector="app.kubernetes.io/component=flow")
        kubelet.behave = lambda pod: run_container(kubelet, pod, places | auth)
        with worker(worker_python, plane, token, {"PREFECT_API_URL": api} | auth, stand.namespace, tmp_path):
            deployment = served.call("GET", "deployments/name/train/here")["id"]
            asked = {"parameters": {"settings": settings}, "state": {"type": "SCHEDULED"}}
            flow_run = served.call("POST", f"deployments/{deployment}/create_flow_run", **asked)["id"]
            ended = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
            until(lambda: served.state(flow_run) in ended, "the flow run's end", seconds=1500)
            assert served.state(flow_run) == "COMPLETED"
            jobs = stand.admin.get(f"/apis/batch/v1/namespaces/{stand.namespace}/jobs")["items"]
            kubelet.stop()
        [job] = jobs
        assert job["metadata"]["labels"]["app.kubernetes.io/component"] == "flow"
        assert job["spec"]["template"]["spec"]["serviceAccountName"] == "roundhouse-flow"
        assert served.run("on-the-cluster").summary() is not None


def install(stand: Stand) -> str:
    """The worker's account with its Role; its token."""
    plurals = {"Role": "roles", "RoleBinding": "rolebindings", "ServiceAccount": "serviceaccounts"}
    flow = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "roundhouse-flow"}}
    for item in [flow, *yaml.safe_load_all((POOL / "rbac.yaml").read_text())]:
        for subject in item.get("subjects", []):
            subject["namespace"] = stand.namespace
        prefix = f"/apis/{item['apiVersion']}" if "/" in item["apiVersion"] else f"/api/{item['apiVersion']}"
        stand.admin.create(f"{prefix}/namespaces/{stand.namespace}/{plurals[item['kind']]}", item)
    install_base(stand, "admission.yaml")
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "roundhouse-flow"}}
    with suppress(ApiRefused):  # there from another test
        stand.admin.create("/apis/scheduling.k8s.io/v1/priorityclasses", body | {"value": 1})
    path = f"/api/v1/namespaces/{stand.namespace}/serviceaccounts/roundhouse-worker/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    return str(stand.admin.create(path, request)["status"]["token"])


@contextmanager
def worker(
    python: Path, plane: ControlPlane, token: str, api: dict[str, str], namespace: str, directory: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Prefect's worker as its Deployment starts it, with the token of its account."""
    tree = yaml.safe_load(plane.kubeconfig().read_text())
    tree["users"][0]["user"] = {"token": token}
    (directory / "kubeconfig").write_text(yaml.safe_dump(tree))
    [manifest] = yaml.safe_load_all((POOL / "worker.yaml").read_text())
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    given = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    given |= {"HOME": str(directory), "PREFECT_HOME": str(directory / "worker")} | api
    given |= {"PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES": namespace}
    given |= {"KUBECONFIG": str(directory / "kubeconfig"), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    arguments = [{"roundhouse": "cluster"}.get(each, each) for each in container["args"]]
    arguments = [each for each in arguments if each != "--with-healthcheck"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "PYTHON"))}
    with (directory / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [str(python.parent / arguments[0]), *arguments[1:]], env=clean | given, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
        text = (directory / "worker.log").read_text()
        refused = [line for line in text.splitlines() if "orbidden" in line]
        assert not refused, f"the worker's Role lacks something: {refused[0][:600]}"
        assert "Traceback" not in text, text[-3000:]
