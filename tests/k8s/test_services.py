"""The component `services`: a Prefect and an MLflow server on PostgreSQL that outlive runs.

If PostgreSQL is installed, both servers run on it with the arguments and variables of the manifests. MLflow needs psycopg2 and
Flask-WTF for that, which its image has and the lock does not.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.k8s.validation import OVERLAYS, ROOT, pod_specs, problems, rendered_at, unrestricted, with_kubectl
from tests.ports import free_port
from tests.postgres import database, tables
from tests.waiting import until

Object = dict[str, Any]

COMPONENT = ROOT / "k8s/components/services"
SECRETS = {
    "roundhouse-services": {
        "POSTGRES_PASSWORD",
        "PREFECT_DATABASE_PASSWORD",
        "MLFLOW_DATABASE_PASSWORD",
        "MLFLOW_FLASK_SERVER_SECRET_KEY",
    },
    "roundhouse-prefect": {"PREFECT_API_AUTH_STRING"},
    "roundhouse-mlflow": {"MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"},
}
SERVERS = {"roundhouse-prefect": "prefect-server", "roundhouse-mlflow": "mlflow", "roundhouse-postgres": "database"}


def with_services(directory: Path, overlay: str, *more: str) -> list[Object]:
    k8s = Path(os.path.relpath(ROOT / "k8s", directory.resolve()))
    tree = {
        "namespace": "roundhouse",
        "resources": [str(k8s / "overlays" / overlay)],
        "components": [str(k8s / "components" / name) for name in ("services", *more)],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    return rendered_at(directory)


def workload(items: list[Object], name: str) -> Object:
    return next(
        item for item in items if item["kind"] in ("Deployment", "StatefulSet") and item["metadata"]["name"] == name
    )


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_servers_are_valid_restricted_probed_and_keep_their_data(overlay: str, tmp_path: Path) -> None:
    items = with_services(tmp_path, overlay, "services-ingress")
    for item in items:
        if not item["apiVersion"].startswith("ray.io/"):
            assert problems(item) == []
    accounts = {item["metadata"]["name"]: item for item in items if item["kind"] == "ServiceAccount"}
    for name in SERVERS:
        [(path, spec)] = list(pod_specs(workload(items, name)))
        assert unrestricted(spec) == [], f"{name}{path}"
        assert spec["automountServiceAccountToken"] is False
        assert spec["serviceAccountName"] in accounts
        [container] = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), (
            "none of them is restarted by hand"
        )
        assert "ephemeral-storage" in container["resources"]["requests"]
    claims = {item["metadata"]["name"] for item in items if item["kind"] == "PersistentVolumeClaim"}
    assert "roundhouse-mlflow" in claims
    [template] = workload(items, "roundhouse-postgres")["spec"]["volumeClaimTemplates"]
    assert template["metadata"]["name"] == "data"
    [ingress] = [item for item in items if item["kind"] == "Ingress"]
    hosts = {rule["host"] for rule in ingress["spec"]["rules"]}
    assert {host for entry in ingress["spec"]["tls"] for host in entry["hosts"]} == hosts, "each page has TLS"


@with_kubectl
def test_every_secret_and_map_that_the_servers_name_is_told_of(tmp_path: Path) -> None:
    items = with_services(tmp_path, "kind")
    page = (ROOT / "docs/kubernetes.md").read_text()
    made = {item["metadata"]["name"]: set(item["data"]) for item in items if item["kind"] == "ConfigMap"}
    for name in SERVERS:
        [container] = [spec["containers"][0] for _, spec in pod_specs(workload(items, name))]
        for variable in container["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            assert reference is None or reference["key"] in SECRETS[reference["name"]]
        [spec] = [spec for _, spec in pod_specs(workload(items, name))]
        named = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
        assert named <= set(made)
    for secret, keys in SECRETS.items():
        assert f"create secret generic {secret}" in page
        assert all(f"--from-literal={key}=" in page for key in keys)


@with_kubectl
def test_flow_pods_point_at_the_servers_and_do_without_them(tmp_path: Path) -> None:
    items = with_services(tmp_path, "kind")
    [services] = [item for item in items if item["metadata"]["name"] == "roundhouse-services" and "data" in item]
    ports = {item["metadata"]["name"]: item["spec"]["ports"][0]["port"] for item in items if item["kind"] == "Service"}
    for variable, server in (("PREFECT_API_URL", "roundhouse-prefect"), ("MLFLOW_TRACKING_URI", "roundhouse-mlflow")):
        url = httpx.URL(services["data"][variable])
        assert (url.host, url.port) == (server, ports[server])
    [flow] = [item for item in items if item["kind"] == "Job"]
    template = yaml.safe_load((ROOT / "k8s/components/work-pool/base-job-template.yaml").read_text())
    for job in (flow, template["job_configuration"]["job_manifest"]):
        sources = job["spec"]["template"]["spec"]["containers"][0]["envFrom"]
        named = {name["name"]: name.get("optional") for each in sources for name in each.values()}
        assert {each: named[each] for each in ("roundhouse-services", "roundhouse-prefect", "roundhouse-mlflow")} == {
            "roundhouse-services": True,
            "roundhouse-prefect": True,
            "roundhouse-mlflow": True,
        }
    [line] = (ROOT / "k8s/components/work-pool/prefect.env").read_text().splitlines()
    assert line == f"PREFECT_API_URL={services['data']['PREFECT_API_URL']}", "the worker's server is the flow runs'"


@with_kubectl
def test_only_the_servers_reach_the_database_and_only_flow_and_worker_the_servers(tmp_path: Path) -> None:
    policies = [item["spec"] for item in with_services(tmp_path, "kind") if item["kind"] == "NetworkPolicy"]
    label = "app.kubernetes.io/component"

    def reach(component: str) -> set[str]:
        rules = [
            rule
            for spec in policies
            if (spec["podSelector"].get("matchLabels") or {}).get(label) == component
            for rule in spec.get("ingress", [])
        ]
        assert all(rule["ports"] for rule in rules)
        return {source["podSelector"]["matchLabels"][label] for rule in rules for source in rule["from"]}

    assert reach("database") == {"prefect-server", "mlflow"}
    assert reach("prefect-server") == {"flow", "worker"}
    assert reach("mlflow") == {"flow"}
    [calls] = [spec["egress"] for spec in policies if spec["podSelector"].get("matchLabels") == {label: "database"}]
    assert calls == []


def test_the_servers_have_the_versions_of_the_lock() -> None:
    lock = dict(re.findall(r"(?m)^([a-z0-9-]+)==([^ ;\\]+)", (ROOT / "requirements.lock").read_text()))
    images = yaml.safe_load((ROOT / "k8s/images.yaml").read_text())
    charts = {
        name: yaml.safe_load((ROOT / f"k8s/charts/{name}.yaml").read_text()) for name in ("prefect-server", "mlflow")
    }
    prefect, mlflow = f":{lock['prefect']}-python3.11", f":v{lock['mlflow']}-full"
    assert images["prefect"].endswith(prefect)
    assert images["prefect-worker"].endswith(f"{prefect}-kubernetes")
    assert images["mlflow"].endswith(mlflow)
    assert charts["prefect-server"]["global"]["prefect"]["image"]["prefectTag"] == prefect.removeprefix(":")
    assert charts["mlflow"]["image"]["tag"] == mlflow.removeprefix(":")
    assert charts["prefect-server"]["server"]["basicAuth"]["enabled"] is True
    assert charts["mlflow"]["server"]["value_options"]["app_name"] == "basic-auth"


@contextmanager
def server(
    name: str, directory: Path, port: int, secrets: dict[str, dict[str, str]], database_port: int
) -> Iterator[str]:
    """A server's process as its manifest starts it, with the database and the volumes of this machine; its URL."""
    file = COMPONENT / f"{name.removeprefix('roundhouse-')}.yaml"
    manifest = next(item for item in yaml.safe_load_all(file.read_text()) if item["kind"] == "Deployment")
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    directory.mkdir()
    places = {
        "roundhouse-postgres:5432": f"127.0.0.1:{database_port}",
        "/etc/mlflow": str(directory),
        "/mlflow/artifacts": str(directory / "artifacts"),
        "/tmp": str(directory),
        "0.0.0.0": "127.0.0.1",
        "5000": str(port),
        "4200": str(port),
    }

    def here(text: str) -> str:
        return re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], text)

    (directory / "basic_auth.ini").write_text(here((COMPONENT / "basic_auth.ini").read_text()))
    given = {}
    for item in container["env"]:
        reference = item.get("valueFrom", {}).get("secretKeyRef")
        given[item["name"]] = here(item["value"]) if reference is None else secrets[reference["name"]][reference["key"]]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT", "MLFLOW", "PG"))}
    command, *arguments = [here(each) for each in [*container.get("command", []), *container["args"]]]
    probe = container["readinessProbe"]["httpGet"]["path"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / command), *arguments],
            env=clean | given,
            cwd=directory,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            assert process.poll() is None, (directory / "log").read_text()[-4000:]
            try:
                return httpx.get(url + probe, timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        until(healthy, name)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.long
def test_prefect_and_mlflow_run_on_postgresql_as_the_manifests_start_them() -> None:
    import tempfile

    secrets = {name: {key: f"{key.lower()}-0123456789" for key in keys} for name, keys in SECRETS.items()}
    secrets["roundhouse-prefect"]["PREFECT_API_AUTH_STRING"] = "admin:of-the-test"
    passwords = secrets["roundhouse-services"]
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        )  # open to PostgreSQL's user, and short
        directory.chmod(0o755)
        (directory / "postgres").mkdir()
        port = stack.enter_context(database(directory / "postgres", passwords, COMPONENT / "databases.sh"))
        prefect = stack.enter_context(server("roundhouse-prefect", directory / "prefect", free_port(), secrets, port))
        assert httpx.post(f"{prefect}/api/flows/filter", json={}).status_code == 401
        auth = httpx.BasicAuth("admin", "of-the-test")
        made = httpx.post(f"{prefect}/api/flows/", json={"name": "a-flow"}, auth=auth)
        assert made.status_code == 201
        assert "flow_run" in tables(port, "prefect", "prefect", passwords["PREFECT_DATABASE_PASSWORD"])
        missing = [each for each in ("psycopg2", "flask_wtf") if importlib.util.find_spec(each) is None]
        if missing:
            pytest.skip(f"Prefect ran on PostgreSQL; MLflow was not run: not installed here: {', '.join(missing)}")
        mlflow = stack.enter_context(server("roundhouse-mlflow", directory / "mlflow", free_port(), secrets, port))
        experiments = f"{mlflow}/api/2.0/mlflow/experiments/create"
        assert httpx.post(experiments, json={"name": "e"}).status_code == 401
        person = base64.b64encode(
            ":".join(sorted(secrets["roundhouse-mlflow"].values(), reverse=True)).encode()
        ).decode()
        headers = {"Authorization": f"Basic {person}"}
        assert httpx.post(experiments, json={"name": "e"}, headers=headers).status_code == 200
        foreign = httpx.post(experiments, json={"name": "f"}, headers=headers | {"Host": "evil.example"})
        assert foreign.status_code == 403, "another host's name"
        assert "runs" in tables(port, "mlflow", "mlflow", passwords["MLFLOW_DATABASE_PASSWORD"])
        assert "users" in tables(port, "mlflow_auth", "mlflow", passwords["MLFLOW_DATABASE_PASSWORD"])
