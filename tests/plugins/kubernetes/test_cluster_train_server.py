"""The component `train-server` on a real node: a run that trains with it, and the cost of losing its pod or a rank.

The test takes the part of the flow, outside of the cluster: it calls the Service's address, which this machine must reach
like a node. Cluster and images: `tests/plugins/kubernetes/nodes.py`; bucket: `tests/plugins/kubernetes/test_cluster_cache.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.run import Run, open_run
from tests.k8s.validation import ROOT
from tests.plugins.kubernetes.nodes import Nodes
from tests.plugins.kubernetes.test_cluster_cache import answers, bucket  # noqa: F401 - a fixture
from tests.plugins.kubernetes.test_cluster_jobs import nodes  # noqa: F401 - a fixture
from tests.plugins.kubernetes.test_cluster_ranks import PODS as RANKS
from tests.plugins.kubernetes.test_cluster_ranks import Bucket, expected, own_connections  # noqa: F401 - fixtures
from tests.stages.test_train import checkpoint_digests, make_run, sequences
from tests.waiting import until

Object = dict[str, Any]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "roundhouse-train-server"
PORT = 8500
TOKEN = "token-of-the-test"
SECONDS = 240
SMALL = [
    ("replace", "args", ["train-server", "--host", "0.0.0.0", "--port", str(PORT), "--processes", str(RANKS)]),
    ("remove", "resources/limits/nvidia.com~1gpu", None),
    ("replace", "resources/limits/memory", "4Gi"),
    ("replace", "resources/requests", {"cpu": "100m", "memory": "1Gi", "ephemeral-storage": "1Gi"}),
    ("add", "env/-", {"name": "OMP_NUM_THREADS", "value": "1"}),
]
"""What a node without GPUs changes of the container."""


def rendered(directory: Path, namespace: str, image: str) -> list[Object]:
    """The base with the component, by kustomize as a team would write it, without the gym server."""
    name, _, tag = image.rpartition(":")
    changes = [
        {"op": op, "path": f"/spec/template/spec/containers/0/{path}"} | ({} if value is None else {"value": value})
        for op, path, value in SMALL
    ]
    tree = {
        "namespace": namespace,
        "resources": [os.path.relpath(ROOT / "k8s/base", directory)],
        "components": [os.path.relpath(ROOT / "k8s/components/train-server", directory)],
        "images": [{"name": "roundhouse/trainer", "newName": name, "newTag": tag}],
        "patches": [{"target": {"kind": "Deployment", "name": NAME}, "patch": json.dumps(changes)}],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    items = [item for item in yaml.safe_load_all(done.stdout) if item]
    return [item for item in items if item["metadata"]["name"] != "gym-calculator"]


class Server:
    """The component, applied; and a run that trains there."""

    def __init__(self, nodes: Nodes, bucket: Bucket, tmp_path: Path) -> None:  # noqa: F811
        self.nodes, self.cache = nodes, tmp_path / "cache"
        store, variables = bucket
        secrets = [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": nodes.namespace},
                "stringData": values,
            }
            for name, values in (
                ("roundhouse-flow", {"ROUNDHOUSE_TRAIN_TOKEN": TOKEN}),
                ("roundhouse-store", variables),
            )
        ]
        (directory := tmp_path.resolve() / "overlay").mkdir()
        text = yaml.safe_dump_all([*secrets, *rendered(directory, nodes.namespace, nodes.image)])
        apply = ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-"]
        done = subprocess.run(apply, input=text, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        began = time.monotonic()
        self.ready()
        print(f"ready after {time.monotonic() - began:.1f} s")
        address = nodes.cluster.get(f"{nodes.path('services')}/{NAME}")["spec"]["clusterIP"]
        if not answers(address, PORT):
            pytest.skip("this machine does not reach the addresses of Services: no flow for the server")
        self.url = f"http://{address}:{PORT}"
        (token := tmp_path / "token").write_text(f"{TOKEN}\n")
        service = {"kind": "remote", "url": self.url, "token_file": str(token)}
        self.run: Run = open_run(parse_config(make_run(store, tmp_path, **service).config.model_dump(mode="json")))
        self.base = starting_policy(self.run)

    def pods(self) -> list[Object]:
        return self.nodes.found("pods", f"app.kubernetes.io/name={NAME}")

    def ready(self) -> str:
        """Name of the one pod that takes calls, once there is one."""

        def found() -> str | None:
            for pod in self.pods():
                conditions = {item["type"]: item["status"] for item in pod["status"].get("conditions") or []}
                if conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp"):
                    return str(pod["metadata"]["name"])
            return None

        return str(until(found, "a train server that is ready", seconds=SECONDS))

    def inside(self, pod: str, program: str) -> str:
        """Return the output of a program in its container."""
        command = ["kubectl", "exec", "-n", self.nodes.namespace, pod, "--", "python", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def attempt(self, iteration: int) -> dict[str, str]:
        """The files of the next version."""
        began = time.monotonic()
        try:
            update = train_iteration(self.run, iteration, sequences(self.run, iteration), self.base, self.cache, print)
        finally:
            print(f"iteration {iteration}, an attempt: {time.monotonic() - began:.1f} s")
        self.base = publish(self.run, update)
        return checkpoint_digests(self.base)

    def delete(self) -> None:
        self.nodes.cluster.delete(f"{self.nodes.path('deployments')}/{NAME}", propagation="Background")
        until(lambda: not self.pods(), "no pod of the server", seconds=SECONDS)


@pytest.fixture
def server(nodes: Nodes, bucket: Bucket, tmp_path: Path) -> Iterator[Server]:  # noqa: F811
    served = Server(nodes, bucket, tmp_path)
    yield served
    trainer_home.release_trainers()
    served.delete()


def test_a_run_at_the_server_writes_what_as_many_ranks_of_one_machine_write(
    server: Server,
    expected: list[dict[str, str]],  # noqa: F811
) -> None:
    pod = server.ready()
    assert [server.attempt(iteration) for iteration in (1, 2)] == expected
    [left] = server.pods()
    assert left["metadata"]["name"] == pod
    assert [status["restartCount"] for status in left["status"]["containerStatuses"]] == [0]
    assert httpx.post(f"{server.url}/v1/facts").status_code == 401, "without the token"


def delete(server: Server, pod: str) -> None:
    """Delete the pod as an eviction does."""
    server.nodes.cluster.delete(f"{server.nodes.path('pods')}/{pod}", propagation="Background")


def kill(server: Server, pod: str) -> None:
    """A rank that does not lead; the server itself stays."""
    program = (
        "import os, pathlib; "
        "pids = [int(p.parent.name) for p in pathlib.Path('/proc').glob('[0-9]*/environ')"
        " if b'\\0RANK=1\\0' in b'\\0' + p.read_bytes()]; "
        "print(pids); [os.kill(pid, 9) for pid in pids]"
    )
    assert re.search(r"\d", server.inside(pod, program)), "no rank 1"


@pytest.mark.parametrize("lose", [delete, kill])
def test_what_is_lost_is_told_and_the_next_attempt_writes_the_same_at_the_replacement(
    server: Server,
    expected: list[dict[str, str]],  # noqa: F811
    lose: Callable[[Server, str], None],
) -> None:
    assert server.attempt(1) == expected[0]
    lose(server, pod := server.ready())
    with pytest.raises(InfraError) as lost:
        server.attempt(2)
    print(f"told: {lost.value}")
    assert server.attempt(2) == expected[1]
    assert (server.ready() == pod) == (lose is kill)
