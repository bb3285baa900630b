"""The optional component that lets engines to the flow's pod, where weights come from it, in every overlay with flows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.weight_sync.base import load_transport
from tests.k8s.test_pod_monitors import key, matches, pods, with_component
from tests.k8s.validation import OVERLAYS, problems, rendered


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl to render overlays with")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_it_lets_the_engine_to_the_flow_and_nobody_to_anything_else(overlay: str, tmp_path: Path) -> None:
    items, plain = with_component(overlay, tmp_path, "weight-transfer"), rendered(overlay)
    [added] = [item for item in items if key(item) not in {key(other) for other in plain}]
    assert [item for item in items if item is not added] == plain
    assert problems(added) == []
    assert added["metadata"]["namespace"] == "roundhouse"
    [rule] = added["spec"]["ingress"]
    [source] = rule["from"]
    for component, selector in (("flow", added["spec"]["podSelector"]), ("engine", source["podSelector"])):
        labels = [labels for labels, _, _ in pods(items) if matches(selector, labels)]
        assert labels
        assert {one["app.kubernetes.io/component"] for one in labels} == {component}
    [ports] = rule["ports"]
    assert not any(
        ports["port"] <= port["containerPort"] <= ports["endPort"] for _, all_, _ in pods(items) for port in all_
    )


def test_a_run_on_kubernetes_may_name_it() -> None:
    config = parse_config(
        {
            "run_id": "a",
            "store": "s3://bucket/runs",
            "generation": {"weight_sync": "transfer"},
            "infra": {"kind": "kubernetes", "engine": {"ray_service": "engine", "url": "http://engine:8000"}},
        }
    )
    load_transport(config.generation.weight_sync).check(config)
