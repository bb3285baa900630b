"""The `kind` overlay on a cluster that runs containers: a whole run in pods, in a separate namespace.

Cluster and images: `tests/plugins/kubernetes/nodes.py`. `ROUNDHOUSE_BACKEND=transformers` for an engine image without vLLM.
A run of two iterations takes minutes, most of them the starts of pods.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.plugins.kubernetes.overlay import Deployed, deployed_overlay
from tests.waiting import until

Object = dict[str, Any]

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed_overlay(tmp_path_factory.mktemp("overlay")) as ready:
        yield ready


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
    policy = {"kind": "pretrained", "path": f"/store/runs/{small}/checkpoints/000000"}
    deployed.end(deployed.train("remote", iterations=1, environment=deployed.gym_environment(), policy=policy))
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
