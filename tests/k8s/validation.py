"""Offline validation of manifests: checks by the published schemas, and further checks.

Schemas (PyPI kubernetes-validate, the CRDs of KubeRay) find unknown fields, wrong types and missing fields. They accept
wrong enum values, quantities and names, so `lint` checks those.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils
import pytest
import yaml

Object = dict[str, Any]

kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
"""It reads megabytes of JSON for each manifest, which are the same for all."""

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.parent.name for path in (ROOT / "k8s/overlays").glob("*/kustomization.yaml"))
CRDS = ROOT.parent / "shared/kuberay-crds"
"""Outside the repository: a megabyte each."""
POD_MONITOR_GROUP = "monitoring.coreos.com"
KUEUE_GROUP = "kueue.x-k8s.io"
"""Without a schema here: tests/plugins/kubernetes/operators applies these before Kueue itself."""
POD_MONITOR_CRD = Path(__file__).with_name("pod_monitor_crd.yaml")
"""By hand: the operator's own is not at hand."""
VERSIONS = ("1.32", "1.35", "1.37")

with_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl: install the client of Kubernetes"
)

_QUANTITY = re.compile(r"^\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")
_DNS = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")
_LABEL = re.compile(r"^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$")
_CHOICES = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "protocol": {"TCP", "UDP", "SCTP"},
    "completionMode": {"Indexed", "NonIndexed"},
    "terminationMessagePolicy": {"File", "FallbackToLogsOnError"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "medium": {"", "Memory", "HugePages"},
    "sessionAffinity": {"None", "ClientIP"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
}


def rendered(overlay: str) -> list[Object]:
    """An overlay's manifests, by kubectl."""
    return rendered_at(ROOT / "k8s/overlays" / overlay)


def rendered_at(directory: Path) -> list[Object]:
    """The manifests of a kustomization, by kubectl."""
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def written() -> Iterator[tuple[str, Object]]:
    """Every manifest as it stands in the tree, patches and kustomizations left out."""
    for file in sorted((ROOT / "k8s").rglob("*.yaml")):
        for item in yaml.safe_load_all(file.read_text()):
            if isinstance(item, dict) and item.get("kind") not in (None, "Kustomization", "Component"):
                yield file.relative_to(ROOT).as_posix(), item


def problems(item: Object) -> list[str]:
    """Return the faults of a manifest."""
    name = f"{item['kind']} {item['metadata']['name']}"
    group = item["apiVersion"].split("/")[0]
    if "." in group and not group.endswith((".k8s.io", ".io")) and group != POD_MONITOR_GROUP:
        return [f"{name}: group of {item['apiVersion']} unknown here"]
    found = [f"{name}: {problem}" for problem in lint(item)]
    if group == KUEUE_GROUP:
        return found
    if group in ("ray.io", POD_MONITOR_GROUP):
        return found + [f"{name}: {problem}" for problem in _by_crd(item)]
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{name} on {version}: {error.message} at {'.'.join(map(str, error.path))}")
    return found


def lint(item: Object) -> Iterator[str]:
    """Enums, quantities, names and labels."""
    if not _DNS.match(item["metadata"]["name"]):
        yield f"{item['metadata']['name']!r} is not a DNS name"
    for path, key, value in _walk(item, ""):
        if key in _CHOICES and isinstance(value, str) and value not in _CHOICES[key]:
            yield f"{path}: {value!r} is none of {sorted(_CHOICES[key])}"
        if key in ("requests", "limits") and isinstance(value, dict):
            bad = {name: amount for name, amount in value.items() if not _QUANTITY.match(str(amount))}
            if bad:
                yield f"{path}: no quantities: {bad}"
        if key == "sizeLimit" and not _QUANTITY.match(str(value)):
            yield f"{path}: {value!r} is no quantity"
        if key in ("labels", "matchLabels") and isinstance(value, dict):
            bad = {name: text for name, text in value.items() if not _LABEL.match(str(text))}
            if bad:
                yield f"{path}: no label values: {bad}"


def pod_specs(item: Any, path: str = "") -> Iterator[tuple[str, Object]]:
    """Yield the spec of every pod below: a template's, and of a Ray cluster those made by KubeRay from its templates."""
    if isinstance(item, dict) and "headGroupSpec" in item:
        yield from ((f"{path}.{name}", spec) for name, spec in pods_as_made(item).items())
    elif isinstance(item, dict):
        if isinstance(item.get("containers"), list):
            yield path, item
        for key, value in item.items():
            yield from pod_specs(value, f"{path}.{key}")
    elif isinstance(item, list):
        for index, value in enumerate(item):
            yield from pod_specs(value, f"{path}[{index}]")


def pods_as_made(cluster: Object) -> dict[str, Object]:
    """Return the pods that KubeRay makes of a `rayClusterConfig`: spec of the head and of a pod of each worker group, by name.

    It adds to the templates (ray-operator/controllers/ray/common/pod.go) the autoscaler's container, with
    `autoscalerOptions`, its command and resources, and `wait-gcs-ready`, with a copy of the Ray container's security.
    """
    cluster = json.loads(json.dumps(cluster))
    head = cluster["headGroupSpec"]["template"]["spec"]
    if cluster.get("enableInTreeAutoscaling"):
        amounts = {"cpu": "500m", "memory": "512Mi"}
        autoscaler = {
            "name": "autoscaler",
            "image": head["containers"][0]["image"],
            "command": ["/bin/bash", "-c", "--"],
            "args": ["ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME)"],
            "resources": {"limits": amounts, "requests": amounts},
        }
        options = cluster.get("autoscalerOptions", {})
        named = {
            "resources",
            "image",
            "imagePullPolicy",
            "env",
            "envFrom",
            "volumeMounts",
            "securityContext",
            "command",
            "args",
        }
        head["containers"].append(autoscaler | {key: options[key] for key in options if key in named})
    pods = {"head": head}
    for group in cluster.get("workerGroupSpecs", []):
        worker = group["template"]["spec"]
        ray = worker["containers"][0]
        waiting = {key: ray[key] for key in ("image", "env", "volumeMounts", "securityContext") if key in ray}
        waiting |= {"name": "wait-gcs-ready", "command": ["/bin/bash", "-c", "--"], "args": ["ray health-check"]}
        waiting["resources"] = {"limits": {"cpu": "200m", "memory": "256Mi"}}
        worker["initContainers"] = [*worker.get("initContainers", []), waiting]
        pods[group["groupName"]] = worker
    return pods


def unrestricted(spec: Object) -> list[str]:
    """Return the violations of Pod Security `restricted` and of our rule of read-only roots in a pod."""
    found = []
    whole = spec.get("securityContext", {})
    if not whole.get("runAsNonRoot") or not whole.get("runAsUser"):
        found.append("may run as root")
    if whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("no seccomp profile")
    if (
        spec.get("hostNetwork")
        or spec.get("hostPID")
        or any("hostPath" in volume for volume in spec.get("volumes", []))
    ):
        found.append("takes part in its host")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities", {}).get("drop") != ["ALL"]:
            found.append(f"container {container['name']} keeps privileges")
        if own.get("readOnlyRootFilesystem") is not True:
            found.append(f"container {container['name']} can write to its root")
        if "memory" not in container.get("resources", {}).get("limits", {}):
            found.append(f"container {container['name']} has no memory limit")
    return found


def _walk(item: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    if isinstance(item, dict):
        for key, value in item.items():
            yield f"{path}.{key}", key, value
            yield from _walk(value, f"{path}.{key}")
    elif isinstance(item, list):
        for index, value in enumerate(item):
            yield from _walk(value, f"{path}[{index}]")


def _by_crd(item: Object) -> Iterator[str]:
    schema = crd_schema(item["kind"], item["apiVersion"].split("/")[1])
    for error in jsonschema.Draft7Validator(schema).iter_errors(item):
        yield f"{error.message[:300]} at {'.'.join(map(str, error.path))}"


@cache
def crd_schema(kind: str, version: str) -> Object:
    """The CRD's schema, closed to unknown fields."""
    crd = crd_of(kind)
    [found] = [item for item in crd["spec"]["versions"] if item["name"] == version]
    schema = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return dict(_strict(schema))


@cache
def crd_of(kind: str) -> Object:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    file = POD_MONITOR_CRD if kind == "PodMonitor" else CRDS / f"ray.io_{kind.lower()}s.yaml"
    return dict(yaml.load(file.read_text(), Loader=loader))


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(strict.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in strict:
        strict.setdefault("additionalProperties", False)
    if strict.pop("x-kubernetes-int-or-string", False):
        strict.pop("type", None)
    if strict.pop("nullable", False) and isinstance(strict.get("type"), str):
        strict["type"] = [strict["type"], "null"]
    return strict
