"""Overlays with an optional component, and what their manifests say of pods."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.validation import ROOT, rendered_at

Object = dict[str, Any]

RAY = {"name": "metrics", "containerPort": 8080}
"""What KubeRay adds to a container of its pods that does not declare it."""


def with_component(overlay: str, directory: Path, component: str = "pod-monitors") -> list[Object]:
    k8s = os.path.relpath(ROOT / "k8s", directory.resolve())
    tree = {"resources": [f"{k8s}/overlays/{overlay}"], "components": [f"{k8s}/components/{component}"]}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(tree | {"namespace": "roundhouse"}))
    return rendered_at(directory)


def of_kind(items: list[Object], kind: str) -> list[Object]:
    return [item for item in items if item["kind"] == kind]


def key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def pods(items: list[Object]) -> list[tuple[Object, list[Object], bool]]:
    """(labels, declared ports, whether KubeRay makes it) of every pod template."""
    found: list[tuple[Object, list[Object], bool]] = []

    def look(item: Any, ray: bool) -> None:
        if isinstance(item, dict):
            template = item.get("template")
            if isinstance(template, dict) and "metadata" in template:
                ports = [port for each in template["spec"]["containers"] for port in each.get("ports", [])]
                found.append((template["metadata"]["labels"], ports + [RAY] * ray, ray))
            for value in item.values():
                look(value, ray)
        elif isinstance(item, list):
            for value in item:
                look(value, ray)

    for item in items:
        look(item, item["kind"] == "RayService")
    return found


def matches(selector: Object, labels: Object) -> bool:
    asked = selector.get("matchExpressions", [])
    assert {each["operator"] for each in asked} <= {"In"}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in asked
    )
