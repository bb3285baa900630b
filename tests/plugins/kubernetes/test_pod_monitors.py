"""The optional component for the Prometheus operator: its names exist in every overlay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.config.kubernetes import KubernetesInfra
from roundhouse.config.training import ProcessService
from roundhouse.plugins.kubernetes.cluster import ApiRefused
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob
from tests.k8s.components import key, matches, of_kind, pods, with_component
from tests.k8s.validation import OVERLAYS, POD_MONITOR_GROUP, ROOT, crd_of, problems, rendered, with_kubectl
from tests.plugins.kubernetes.control_plane import ControlPlane
from tests.plugins.kubernetes.stand import cluster_of
from tests.waiting import until

Object = dict[str, Any]

pytestmark = with_kubectl


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_component_adds_valid_monitors_and_changes_nothing_else(overlay: str, tmp_path: Path) -> None:
    items, plain = with_component(overlay, tmp_path), rendered(overlay)
    added = [item for item in items if key(item) not in {key(other) for other in plain}]
    assert {item["kind"] for item in added} == {"PodMonitor", "NetworkPolicy"}
    assert [item for item in items if item not in added] == plain
    for item in added:
        assert problems(item) == []
        assert item["metadata"]["namespace"] == "roundhouse"
    assert {item["metadata"]["labels"]["release"] for item in of_kind(added, "PodMonitor")} == {"prometheus"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_ports_that_are_scraped_are_declared_and_open_to_prometheus(overlay: str, tmp_path: Path) -> None:
    items = [*with_component(overlay, tmp_path), trainer({"ROUNDHOUSE_METRICS_PORT": "0.0.0.0:9464"})]
    scraped = set()
    for monitor in of_kind(items, "PodMonitor"):
        for labels, ports, _ in pods(items):
            if not matches(monitor["spec"]["selector"], labels):
                continue
            for endpoint in monitor["spec"]["podMetricsEndpoints"]:
                numbers = [port["containerPort"] for port in ports if port.get("name") == endpoint["port"]]
                for number in numbers:
                    scraped.add((labels["app.kubernetes.io/component"], number))
                    assert any(admits(policy, labels, number) for policy in of_kind(items, "NetworkPolicy"))
    assert scraped == {("flow", 9464), ("gym", 9464), ("trainer", 9464)} | (
        {("engine", 8080)} if overlay == "gpu" else set()
    )


def trainer(environment: dict[str, str]) -> Object:
    """Return the Job of a step with these variables in infra.environment."""
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "uid": "b"}}
    identity = StageIdentity("run", "0123456789ab", 1, "train", "89abcdef0123")
    infra = KubernetesInfra(environment=environment)
    return TrainJob(identity, infra, ProcessService(), reports="s3://b/r", store="s3://b").job(1, owner)


@pytest.mark.parametrize("value", ["0.0.0.0:9464", "[::]:9464"])
def test_a_trainer_that_opens_its_page_says_so_to_prometheus(value: str) -> None:
    job = trainer({"ROUNDHOUSE_METRICS_PORT": value})
    assert problems(job) == []
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": "9464"}
    assert template["spec"]["containers"][0]["ports"] == [{"name": "metrics", "containerPort": 9464}]


@pytest.mark.parametrize(
    "environment", [{}, *({"ROUNDHOUSE_METRICS_PORT": f"{host}9464"} for host in ("", "127.0.0.1:"))]
)
def test_a_trainer_without_a_page_for_others_declares_none(environment: dict[str, str]) -> None:
    template = trainer(environment)["spec"]["template"]
    assert "annotations" not in template["metadata"]
    assert "ports" not in template["spec"]["containers"][0]


def test_every_page_that_the_manifests_open_is_open_to_the_scraper() -> None:
    opened = [
        found.group(1)
        for file in sorted((ROOT / "k8s").rglob("*.yaml"))
        for found in re.finditer(r'ROUNDHOUSE_METRICS_PORT(?:\n\s*value)?: "(.+)"', file.read_text())
    ]
    assert opened == ["0.0.0.0:9464"] * 3  # flow, gym and the work pool's jobs


def admits(policy: Object, labels: Object, port: int) -> bool:
    """Return whether the policy admits Prometheus of another namespace to the pod."""
    if not matches(policy["spec"]["podSelector"], labels):
        return False
    return any(
        "namespaceSelector" in source
        and source.get("podSelector", {}).get("matchLabels") == {"app.kubernetes.io/name": "prometheus"}
        and port in [each["port"] for each in rule["ports"]]
        for rule in policy["spec"].get("ingress", [])
        for source in rule.get("from", [])
    )


def test_a_misspelt_field_a_wrong_duration_and_an_unknown_operator_are_found() -> None:
    file = ROOT / "k8s/components/pod-monitors/monitors.yaml"
    first, _ = list(yaml.safe_load_all(file.read_text()))
    assert problems(first) == []
    for place, name, value in (
        (first["spec"]["podMetricsEndpoints"][0], "ports", "metrics"),
        (first["spec"]["podMetricsEndpoints"][0], "interval", "15 seconds"),
        (first["spec"]["selector"]["matchExpressions"][0], "operator", "Is"),
    ):
        before = dict(place)
        place[name] = value
        assert problems(first), name
        place.clear()
        place.update(before)
    assert problems(first) == []


def test_a_real_api_server_takes_the_monitors_by_the_definition_that_is_used_offline(plane: ControlPlane) -> None:
    admin = cluster_of(plane.kubeconfig())
    path = f"/apis/{POD_MONITOR_GROUP}/v1/namespaces/default/podmonitors"

    def known() -> bool:
        try:
            return bool(admin.get(path))
        except ApiRefused:
            return False

    if not known():
        admin.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd_of("PodMonitor"))
        until(known, "the definition of PodMonitors")
    for item in yaml.safe_load_all((ROOT / "k8s/components/pod-monitors/monitors.yaml").read_text()):
        admin.create(path, item, dry_run=True)
        with pytest.raises(ApiRefused, match="unknown field"):
            admin.create(path, {**item, "spec": {**item["spec"], "selectors": {}}}, dry_run=True)
