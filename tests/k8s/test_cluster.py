"""The `kind` overlay on a cluster that runs containers: a whole run of its pods, in a namespace of its own.

Where and with which images: `tests/k8s/nodes.py`. `ROUNDHOUSE_BACKEND=transformers` for an engine image without vLLM.
A run of two iterations takes minutes, most of them the starts of pods.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundhouse.config.environments import CalculatorEnvironment
from roundhouse.gym.environments import load
from tests.k8s.nodes import ROLES, Nodes, fresh_namespace, images, until
from tests.k8s.validation import ROOT

Object = dict[str, Any]

RUN_SECONDS = 900
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
        tree["rollout"] |= {"tasks": 4, "group_size": 4}
        tree["train"] |= {"updates": 1}
        tree["generation"] |= {"backend": os.environ.get("ROUNDHOUSE_BACKEND", "vllm")}
        tree["infra"] |= {"namespace": self.nodes.namespace, "state": f"/store/state/{run_id}"}
        tree["infra"]["trainer"] |= {"image": images()["trainer"], "cpu": "100m"} | changed.pop("trainer", {})
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
        """Wait until a Job is over; what its last pod said. Fails the test when the Job failed."""
        conditions = until(lambda: {"Complete", "Failed"} & set(self.conditions(job)), f"end of Job {job}", seconds)
        log = self.nodes.log(self.pods(job)[-1]["metadata"]["name"])
        assert "Complete" in conditions, f"{self.conditions(job)}\n{log[-6000:]}"
        return log

    def train(self, run_id: str, **changed: Any) -> str:
        files = {"run.yaml": yaml.safe_dump(self.config(run_id, **changed)), "tasks.jsonl": TASKS}
        return self.begin(f"flow-{run_id}", files, ["roundhouse", "train", "/etc/roundhouse/run.yaml"])

    def ask(self, name: str, program: str, **files: str) -> Any:
        """The last line of a program that runs beside the store, as JSON."""
        job = self.begin(name, {"ask.py": program, **files}, ["python", "/etc/roundhouse/ask.py"])
        return json.loads(self.end(job, 300).strip().splitlines()[-1])

    def running(self, component: str, saying: str = "") -> str | None:
        """Name of a pod of this component that runs, and whose log has these words."""
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


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    named = images(*ROLES)
    with fresh_namespace(named["trainer"]) as nodes:
        items = rendered(tmp_path_factory.mktemp("overlay").resolve(), nodes.namespace, named)
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


LOOK = """
import json, sys
from roundhouse.store.run import load_run
from roundhouse.store.stage import read_manifest
run = load_run("/store", sys.argv[1] if len(sys.argv) > 1 else open("/etc/roundhouse/run").read())
iterations = []
for number in range(1, run.config.iterations + 1):
    found = {}
    for name in ("refit", "collect", "validate", "train"):
        reference = run.stage(number, name).reference()
        if reference is not None:
            found[name] = {"counts": reference.counts, "metrics": read_manifest(reference).metrics}
    iterations.append(found)
print(json.dumps(iterations))
"""


def look(deployed: Deployed, run_id: str) -> list[Object]:
    """Counts and metrics of each stage of a run."""
    found: list[Object] = deployed.ask(f"look-{run_id}", LOOK, run=run_id)
    return found


@pytest.fixture(scope="module")
def small(deployed: Deployed) -> str:
    """A finished run of two iterations."""
    began = time.monotonic()
    deployed.end(deployed.train("small"))
    print(f"run of two iterations: {time.monotonic() - began:.0f} s")
    return "small"


def test_a_run_of_the_overlay_goes_through_all_its_pods(deployed: Deployed, small: str) -> None:
    iterations = look(deployed, small)
    for found in iterations:
        assert found["collect"]["counts"]["requested"] == 16
        metrics = found["train"]["metrics"]
        print({name: round(value, 2) for name, value in metrics.items() if "kubernetes" in name or "compute" in name})
        assert metrics["train/kubernetes_calls"] <= 12
    assert len(iterations) == 2
    jobs = deployed.nodes.found("jobs", f"roundhouse/run={small}")
    assert sorted(job["metadata"]["labels"]["roundhouse/iteration"] for job in jobs) == ["1", "2"]
    verify = deployed.begin("verify", {"x": ""}, ["roundhouse", "store", "verify", "--store", "/store"])
    deployed.end(verify)


def test_rollouts_are_played_on_the_gym_pod(deployed: Deployed, small: str) -> None:
    until(lambda: deployed.running("gym"), "the gym server")
    remote = {
        "kind": "remote",
        "url": f"http://gym-calculator.{deployed.nodes.namespace}.svc:8001",
        "train_tasks": "/etc/roundhouse/tasks.jsonl",
        "heldout_tasks": "/etc/roundhouse/tasks.jsonl",
        "restore": "replay",
    }
    policy = {"kind": "pretrained", "path": f"/store/runs/{small}/checkpoints/000000"}
    deployed.end(deployed.train("remote", iterations=1, environment=remote, policy=policy))
    [found] = look(deployed, "remote")
    assert found["collect"]["counts"]["requested"] == 16
    assert found["collect"]["counts"].get("failed", 0) == 0


COMPARE = """
import json, pathlib, torch
from safetensors.torch import load_file
from roundhouse.config.loading import load_config
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.train import train_iteration
from roundhouse.store.directories import local_directory
from roundhouse.store.run import load_run, open_run
from roundhouse.store.stage import read_manifest
first, cache = load_run("/store", "small"), pathlib.Path("/scratch/cache")
second = open_run(load_config("/etc/roundhouse/run.yaml"))
base, sequences = first.checkpoint(0).reference(), first.stage(1, "validate").reference()
update = train_iteration(second, 1, sequences, base, cache, print)
one, two = (load_file(local_directory(place, cache) / "model.safetensors")
            for place in (first.checkpoint(1).reference(), publish(second, update)))
start = load_file(local_directory(base, cache) / "model.safetensors")
print(json.dumps({
    "apart": max(float((one[name] - two[name]).abs().max()) for name in one),
    "moved": max(float((one[name] - start[name]).abs().max()) for name in one),
    "metrics": {name: value for name, value in read_manifest(update).metrics.items() if "kubernetes" in name},
}))
"""


def test_two_pods_that_meet_by_torchrun_train_what_one_does(deployed: Deployed, small: str) -> None:
    config = deployed.config("pair", trainer={"pods": 2})
    told = deployed.ask("pair", COMPARE, **{"run.yaml": yaml.safe_dump(config)})
    print(told)
    pods = deployed.nodes.found("pods", "roundhouse/run=pair")
    assert [pod["status"]["phase"] for pod in pods] == ["Succeeded", "Succeeded"]
    assert told["moved"] > 1e-5
    assert told["apart"] < 1e-6, "sums of another order: the rounding of a float32 weight near 1 is 1.2e-7"


@pytest.mark.parametrize("component", ["flow", "engine", "trainer"])
def test_a_run_that_loses_a_pod_ends_well(deployed: Deployed, small: str, component: str) -> None:
    """What it loses is the unfinished part of a stage: the stages before it are found, not made again."""
    policy = {"kind": "pretrained", "path": f"/store/runs/{small}/checkpoints/000000"}
    run_id = f"loses-{component}"
    job = deployed.train(run_id, iterations=1, policy=policy)
    if component == "engine":
        until(lambda: "collect" in deployed.nodes.log(deployed.pods(job)[0]["metadata"]["name"]), "rollouts", 300)
        pod = deployed.running("engine")
    else:
        pod = until(lambda: trainer_of(deployed, run_id), "its trainer", 300)
        pod = deployed.pods(job)[0]["metadata"]["name"] if component == "flow" else pod
    assert pod is not None
    deployed.delete_pod(pod)
    deployed.end(job)
    [found] = look(deployed, run_id)
    assert found["train"]["counts"]["sequences"] > 0


def trainer_of(deployed: Deployed, run_id: str) -> str | None:
    pods = deployed.nodes.found("pods", f"roundhouse/run={run_id}")
    return next((pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Running"), None)
