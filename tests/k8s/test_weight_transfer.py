"""The optional component that lets engines and senders of weights to each other, in every overlay with flows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.weight_sync.base import load_transport
from tests.k8s.components import key, matches, pods, with_component
from tests.k8s.validation import OVERLAYS, problems, rendered, with_kubectl


@with_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_it_lets_the_engine_and_those_that_send_to_each_other_and_nobody_to_anything_else(
    overlay: str, tmp_path: Path
) -> None:
    items, plain = with_component(overlay, tmp_path, "weight-transfer"), rendered(overlay)
    added = [item for item in items if key(item) not in {key(other) for other in plain}]
    assert [item for item in items if item not in added] == plain
    present = {labels["app.kubernetes.io/component"] for labels, _, _ in pods(items)}
    senders = present & {"flow", "train-server"}
    assert "flow" in senders
    ways = []
    for policy in added:
        assert problems(policy) == []
        assert policy["metadata"]["namespace"] == "roundhouse"
        [direction] = policy["spec"]["policyTypes"]
        [rule] = policy["spec"][direction.lower()]
        [peer] = rule["from" if direction == "Ingress" else "to"]
        ends = [meant(items, selector) for selector in (peer["podSelector"], policy["spec"]["podSelector"])]
        ways.append((direction, *(ends if direction == "Ingress" else reversed(ends))))
        [ports] = rule["ports"]
        assert not any(
            ports["port"] <= port["containerPort"] <= ports["endPort"] for _, all_, _ in pods(items) for port in all_
        )
    back, there = ({"engine"}, senders), (senders - {"flow"}, {"engine"})
    assert sorted(ways, key=str) == sorted(
        [("Ingress", *back), ("Ingress", *there), ("Egress", *back), ("Egress", *there)], key=str
    )


def meant(items: list[dict[str, Any]], selector: dict[str, Any]) -> set[str]:
    """The components of the pods that a policy's selector names."""
    every = [labels for labels, _, _ in pods(items)]
    return {labels["app.kubernetes.io/component"] for labels in every if matches(selector, labels)}


def test_a_run_on_kubernetes_may_name_it() -> None:
    pytest.importorskip("roundhouse.plugins.transfer")
    config = parse_config(
        {
            "run_id": "a",
            "store": "s3://bucket/runs",
            "generation": {"weight_sync": "transfer"},
            "infra": {"kind": "kubernetes", "engine": {"ray_service": "engine", "url": "http://engine:8000"}},
        }
    )
    load_transport(config.generation.weight_sync).check(config)
