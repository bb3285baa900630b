"""Templates of Ray clusters are compared as KubeRay writes them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from roundhouse.plugins.kubernetes.ray_template import differences, template_digest
from tests.k8s.validation import ROOT

Object = dict[str, Any]


def template() -> Object:
    """The template of the overlay `gpu`."""
    [service] = yaml.safe_load_all((ROOT / "k8s/overlays/gpu/rayservice.yaml").read_text())
    return dict(service["spec"]["rayClusterConfig"])


def as_written_by_go(template: Object) -> Object:
    """The same template after KubeRay, its autoscaler and Kueue have written to it."""
    for group in (template["headGroupSpec"], *template["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        group["template"]["metadata"] |= {"creationTimestamp": None}
        pod["nodeSelector"] = {"flavor": "h100"}
        pod["hostNetwork"] = False
        for container in pod["containers"]:
            container["resources"]["limits"]["memory"] = {"8Gi": "8192Mi"}.get(
                container["resources"]["limits"]["memory"], container["resources"]["limits"]["memory"]
            )
    template["workerGroupSpecs"][0] |= {
        "replicas": 7,
        "scaleStrategy": {"workersToDelete": ["a"]},
        "rayStartParams": None,
    }
    return template | {"suspend": False}


def test_a_cluster_is_of_its_template_whatever_kuberay_autoscaler_and_kueue_write() -> None:
    assert differences(template(), as_written_by_go(template())) == []
    assert template_digest(template()) == template_digest(as_written_by_go(template()))


@pytest.mark.parametrize("field", ["image", "env", "memory", "minReplicas", "rayVersion", "autoscaler"])
def test_a_changed_template_is_a_difference_with_its_field(field: str) -> None:
    changed = template()
    container = changed["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    if field == "env":
        container["env"].append({"name": "NCCL_DEBUG", "value": "INFO"})
    elif field == "memory":
        container["resources"]["limits"]["memory"] = "65Gi"
    elif field == "minReplicas":
        changed["workerGroupSpecs"][0]["minReplicas"] = 3
    elif field == "rayVersion":
        changed["rayVersion"] = "2.61.0"
    elif field == "autoscaler":
        changed["autoscalerOptions"]["idleTimeoutSeconds"] = 600
    else:
        container["image"] = "team/engine:2"
    [text] = differences(changed, template())
    assert {"autoscaler": "idleTimeoutSeconds"}.get(field, field) in text
    assert template_digest(changed) != template_digest(template())
