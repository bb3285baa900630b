"""The `kind` overlay in a separate namespace, for tests on nodes: its pods, its runs, and its store.

Cluster and images: `tests/plugins/kubernetes/nodes.py`. `ROUNDHOUSE_BACKEND=transformers` for an engine image without vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roundhouse.config.included_environments import CalculatorEnvironment
from roundhouse.environments import load
from tests.k8s.validation import ROOT
from tests.plugins.kubernetes.nodes import ROLES, Nodes, fresh_namespace, images
from tests.waiting import until

Object = dict[str, Any]

RUN_SECONDS = 1500
COLLECTOR = {"cpu": "100m", "memory": "1Gi", "scratch": "1Gi", "priority_class": "roundhouse-collector"}
"""A shard's pod, of which a small node holds several."""
TASKS = "".join(json.dumps(row) + "\n" for row in load(CalculatorEnvironment()).tasks("train")[:16])


@dataclass
class Deployed:
    """The overlay, applied."""

    nodes: Nodes
    flow: Object
    """The flow's Job."""
    settings: Object
    """The overlay's run."""

    def config(self, run_id: str, **changed: Any) -> Object:
        """The overlay's run, small."""
        tree = json.loads(json.dumps(self.settings))
        tree |= {"run_id": run_id, "iterations": 2, "evaluation": {"every": 0, "tasks": 8}}
        tree["policy"] |= {"steps": 300}
        tree["rollout"] |= {"prompts_per_iteration": 4, "group_size": 4}
        tree["train"] |= {"minibatches": 1}
        backend = os.environ.get("ROUNDHOUSE_BACKEND", "vllm")
        tree["generation"] |= {"backend": backend, "start_timeout_seconds": 600}  # vLLM's imports, on a busy node
        tree["infra"] |= {"namespace": self.nodes.namespace, "state": f"/store/state/{run_id}"}
        tree["infra"]["trainer"] |= {"image": images()["trainer"], "cpu": "100m"} | changed.pop("trainer", {})
        if "collector" in changed:
            tree["infra"]["collector"] = COLLECTOR | {"image": images()["flow"]} | changed.pop("collector")
        tree["generation"]["engine_url"] = f"http://roundhouse-engine.{self.nodes.namespace}.svc:9000"
        return tree | changed

    def begin(self, name: str, files: dict[str, str], command: list[str]) -> str:
        """A Job like the flow's, with its rights and volumes: another command, files at /etc/roundhouse."""
        nodes = self.nodes
        job = json.loads(json.dumps(self.flow))
        job["metadata"]["name"] = name
        pod = job["spec"]["template"]["spec"]
        pod["containers"][0] |= {"command": command[:1], "args": command[1:]}
        pod["containers"][0]["resources"]["requests"]["cpu"] = "100m"  # several of them beside the engine, on two CPUs
        next(volume for volume in pod["volumes"] if volume["name"] == "run")["configMap"]["name"] = name
        metadata = {"name": name}
        nodes.cluster.create(
            nodes.path("configmaps"), {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}
        )
        nodes.cluster.create(nodes.path("jobs"), job)
        return name

    def pods(self, job: str) -> list[Object]:
        found = self.nodes.found("pods", f"batch.kubernetes.io/job-name={job}")
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def conditions(self, job: str) -> dict[str, Object]:
        status = self.nodes.cluster.get(f"{self.nodes.path('jobs')}/{job}").get("status", {})
        return {item["type"]: item for item in status.get("conditions") or [] if item["status"] == "True"}

    def end(self, job: str, seconds: float = RUN_SECONDS) -> str:
        """Wait for the end of a Job and return the log of its last pod. Fails the test if the Job failed."""
        conditions = until(
            lambda: {"Complete", "Failed"} & set(self.conditions(job)), f"end of Job {job}", seconds=seconds
        )
        log = self.nodes.log(self.pods(job)[-1]["metadata"]["name"])
        assert "Complete" in conditions, f"{self.conditions(job)}\n{log[-6000:]}"
        return log

    def train(self, run_id: str, **changed: Any) -> str:
        files = {"run.yaml": yaml.safe_dump(self.config(run_id, **changed)), "tasks.jsonl": TASKS}
        return self.begin(f"flow-{run_id}", files, ["roundhouse", "train", "/etc/roundhouse/run.yaml"])

    def ask(self, name: str, program: str, **files: str) -> Any:
        """Run a program in the pod of the store and return its last line as JSON."""
        job = self.begin(name, {"ask.py": program, **files}, ["python", "/etc/roundhouse/ask.py"])
        return json.loads(self.end(job).strip().splitlines()[-1])

    def gym_environment(self) -> Object:
        """The environment that the overlay's gym server serves, as a run names it."""
        return {
            "kind": "remote",
            "url": f"http://gym-calculator.{self.nodes.namespace}.svc:8001",
            "train_tasks": "/etc/roundhouse/tasks.jsonl",
            "heldout_tasks": "/etc/roundhouse/tasks.jsonl",
            "restore": "replay",
        }

    def running(self, component: str, saying: str = "") -> str | None:
        """Return the name of a running pod of this component with these words in its log."""
        for pod in self.nodes.found("pods", f"app.kubernetes.io/component={component}"):
            name = str(pod["metadata"]["name"])
            living = pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
            if living and saying in self.nodes.log(name):
                return name
        return None

    def delete_pod(self, name: str) -> None:
        self.nodes.cluster.delete(f"{self.nodes.path('pods')}/{name}", propagation="Background")


def rendered(directory: Path, namespace: str, named: dict[str, str]) -> list[Object]:
    """The overlay for another namespace and other images, by kustomize as a team would write it."""
    kinds = {"flow": "roundhouse/flow", "engine": "roundhouse/engine", "gym": "roundhouse/gym"}
    replaced = []
    for role, name in kinds.items():
        image, _, tag = named[role].rpartition(":")
        replaced.append({"name": name, "newName": image, "newTag": tag})
    overlay = os.path.relpath(ROOT / "k8s/overlays/kind", directory)
    tree = {"namespace": namespace, "resources": [overlay], "images": replaced}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


@contextmanager
def deployed_overlay(directory: Path) -> Iterator[Deployed]:
    """Apply the overlay, rendered into the directory. Skips the test without nodes."""
    named = images(*ROLES)
    with fresh_namespace(named["trainer"]) as nodes:
        items = rendered(directory.resolve(), nodes.namespace, named)
        # each run is a Job of its own here
        [flow] = [item for item in items if item["kind"] == "Job"]
        [run] = [item for item in items if item["kind"] == "ConfigMap"]
        rest = [item for item in items if item["kind"] != "Job"]
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "roundhouse-flow", "namespace": nodes.namespace},
            "stringData": {"ROUNDHOUSE_ENGINE_TOKEN": "token-of-the-test"},
        }
        apply = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-"]
        text = yaml.safe_dump_all([secret, *rest])
        done = subprocess.run(apply, input=text, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        yield Deployed(nodes, flow, yaml.safe_load(run["data"]["run.yaml"]))
