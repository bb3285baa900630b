"""Resident ranks in pods of real nodes: their training results, and the cost of losing any of them.

The test takes the part of the flow, outside of the cluster: it reads the address of rank 0 from that pod's log, and calls
it. Cluster and images: `tests/plugins/kubernetes/nodes.py`; bucket: `tests/plugins/kubernetes/test_cluster_cache.py`.
"""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from roundhouse.config.loading import parse_config
from roundhouse.errors import InfraError
from roundhouse.plugins.kubernetes.job import is_under_way
from roundhouse.plugins.kubernetes.stage_jobs import PLACE, RANKS_PLACE
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.store.run import Run, open_run
from tests.plugins.kubernetes.nodes import Nodes
from tests.plugins.kubernetes.test_cluster_cache import bucket  # noqa: F401 - a fixture
from tests.plugins.kubernetes.test_cluster_jobs import nodes  # noqa: F401 - a fixture
from tests.stages.test_train import checkpoint_digests, make_run, sequences
from tests.waiting import until

Object = dict[str, Any]
Bucket = tuple[str, dict[str, str]]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SECONDS = 180
PODS = 2


@pytest.fixture(autouse=True)
def own_connections() -> None:
    """No file system that knows the bucket's server of a test before this one."""
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Files of two iterations by as many ranks on this machine."""
    place = tmp_path_factory.mktemp("here")
    run = make_run(str(place / "store"), place, kind="resident", processes=PODS)
    base, written = starting_policy(run), []
    for iteration in (1, 2):
        base = publish(run, train_iteration(run, iteration, sequences(run, iteration), base, place / "cache"))
        written.append(checkpoint_digests(base))
    trainer_home.release_trainers()
    return written


class Ranks:
    """A run with a trainer of `PODS` pods with one rank each."""

    def __init__(self, nodes: Nodes, bucket: Bucket, tmp_path: Path) -> None:  # noqa: F811
        self.nodes, self.cache = nodes, tmp_path / "cache"
        store, variables = bucket
        tree = make_run(store, tmp_path).config.model_dump(mode="json")
        tree["train"]["service"] = {"kind": "resident", "launcher": "kubernetes", "processes": 1}
        tree["infra"] = {
            "kind": "kubernetes",
            "namespace": nodes.namespace,
            "state": str(tmp_path / "flow"),
            "environment": variables | {"OMP_NUM_THREADS": "1"},
            "trainer": {"image": nodes.image, "memory": "2Gi", "cpu": "100m", "scratch": "2Gi", "shared_memory": "64Mi"}
            | {"pods": PODS},
        }
        self.run: Run = open_run(parse_config(tree))
        self.base = starting_policy(self.run)

    def train(self, iteration: int, *attempts: Callable[[], None]) -> dict[str, str]:
        """Train and return the files of a version. Each of `attempts` disturbs one attempt: it is called first, and the
        attempt fails."""
        batch = sequences(self.run, iteration)
        for lose in attempts:
            lose()
            began = time.monotonic()
            with pytest.raises(InfraError) as lost:
                train_iteration(self.run, iteration, batch, self.base, self.cache, print)
            print(f"told after {time.monotonic() - began:.1f} s: {lost.value}")
            assert re.search(r"The resident ranks were lost in .*: (Pod|Job) \S*train-ranks", str(lost.value))
        began = time.monotonic()
        update = train_iteration(self.run, iteration, batch, self.base, self.cache, print)
        print(f"iteration {iteration}: {time.monotonic() - began:.1f} s")
        self.base = publish(self.run, update)
        return checkpoint_digests(self.base)

    def jobs(self) -> list[Object]:
        found = self.nodes.found("jobs", f"roundhouse/run-uid={self.run.uid}")
        return [job for job in found if (job["metadata"].get("annotations") or {}).get(PLACE) == RANKS_PLACE]

    def running(self) -> set[str]:
        """Names of the pods that run, which are there no longer than their Job."""
        return {
            pod["metadata"]["name"]
            for pod in self.nodes.found("pods", f"roundhouse/run-uid={self.run.uid}")
            if pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")
        }

    def pod(self, rank: int) -> str:
        """Name of the pod that has this rank."""
        return next(name for name in self.running() if f"rank {rank} of {PODS}" in self.nodes.log(name))

    def gone(self) -> None:
        """Wait until none is under way; a Job that failed stays for its time to live, with its pods' logs."""
        until(lambda: not any(map(is_under_way, self.jobs())), "no Job of ranks under way", seconds=SECONDS)
        until(lambda: not self.running(), "no pod of ranks", seconds=SECONDS)


@pytest.fixture
def ranks(nodes: Nodes, bucket: Bucket, tmp_path: Path) -> Iterator[Ranks]:  # noqa: F811
    yield Ranks(nodes, bucket, tmp_path)
    trainer_home.release_trainers()


def test_ranks_in_two_pods_write_what_two_ranks_of_one_machine_write_and_stay_until_released(
    ranks: Ranks, expected: list[dict[str, str]]
) -> None:
    written = [ranks.train(1)]
    [job], pods = ranks.jobs(), ranks.running()
    written.append(ranks.train(2))
    assert written == expected
    assert [item["metadata"]["uid"] for item in ranks.jobs()] == [job["metadata"]["uid"]]
    assert ranks.running() == pods
    assert len(pods) == PODS
    began = time.monotonic()
    trainer_home.release_trainers()
    print(f"released after {time.monotonic() - began:.1f} s")
    assert ranks.jobs() == []
    ranks.gone()


def delete(ranks: Ranks) -> None:
    """The pod that the flow calls."""
    ranks.nodes.cluster.delete(f"{ranks.nodes.path('pods')}/{ranks.pod(0)}", propagation="Background")


def kill(ranks: Ranks) -> None:
    """The process of the rank that the flow does not call."""
    pod = ranks.pod(1)
    found = re.search(rf"rank 1 of {PODS}: pid (\d+)", ranks.nodes.log(pod))
    assert found is not None
    program = f"import os; os.kill({found[1]}, 9)"
    command = ["kubectl", "exec", "-n", ranks.nodes.namespace, pod, "--", "python", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def evict(ranks: Ranks) -> None:
    """Evict the pod as a drain of its node does."""
    ranks.nodes.evict(ranks.pod(1))


@pytest.mark.parametrize("lose", [delete, kill, evict])
def test_a_pod_that_is_lost_is_named_and_the_next_attempt_writes_the_same_in_others(
    ranks: Ranks, expected: list[dict[str, str]], lose: Callable[[Ranks], None]
) -> None:
    assert ranks.train(1) == expected[0]
    before = ranks.running()
    assert ranks.train(2, lambda: lose(ranks)) == expected[1]
    assert not before & ranks.running()
    assert len(ranks.running()) == PODS
    trainer_home.release_trainers()
    ranks.gone()


def test_ranks_go_with_the_pod_of_their_flow(
    ranks: Ranks, expected: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector deletes the objects that a flow's pod owns, even without the flow."""
    plan = ranks.nodes.plan("import time; time.sleep(3000)")
    template = plan.job(1, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "uid": "x"}})["spec"][
        "template"
    ]
    flow = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "flow"}, "spec": template["spec"]}
    ranks.nodes.cluster.create(ranks.nodes.path("pods"), flow)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "flow")
        assert ranks.train(1) == expected[0]
    assert [owner["kind"] for job in ranks.jobs() for owner in job["metadata"]["ownerReferences"]] == ["Pod"]
    ranks.nodes.cluster.delete(f"{ranks.nodes.path('pods')}/flow", propagation="Background")
    ranks.gone()
    assert ranks.train(2, lambda: None) == expected[1]
    trainer_home.release_trainers()
    ranks.gone()
