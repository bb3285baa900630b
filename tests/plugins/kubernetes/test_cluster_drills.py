"""Drills on nodes: a pod of a run is deleted in mid-stage, and the store shows the repeated work.

Invariant of each: the run ends with all its iterations, every complete stage stays unchanged, and at most one stage has a
second attempt, which takes over the finished work of the first; the loss of a shard's pod costs no attempt. Each prints its
cost. See `tests/plugins/kubernetes/nodes.py`.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from urllib3.exceptions import HTTPError

from roundhouse.collection.collector import FLUSH_SECONDS
from roundhouse.plugins.kubernetes.cluster import ApiRefused
from tests.plugins.kubernetes.overlay import Deployed, deployed_overlay
from tests.waiting import until

Object = dict[str, Any]

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ITERATIONS = 2
ROLLOUTS = 128
STAGES = ("refit", "collect", "validate", "train")
SECONDS = 900


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed_overlay(tmp_path_factory.mktemp("overlay")) as ready:
        yield ready


@dataclass
class Drill:
    """A run under way in the cluster."""

    deployed: Deployed
    run_id: str
    job: str
    """Of the flow."""

    def flow_pod(self) -> str:
        return str(
            until(lambda: self.deployed.pods(self.job), "the flow's pod", seconds=SECONDS)[-1]["metadata"]["name"]
        )

    def finished(self) -> int | None:
        """Return the finished rollouts of the current collection by the flow's metrics, or None."""
        path = f"{self.deployed.nodes.path('pods')}/{self.flow_pod()}:9464/proxy/metrics"
        try:
            text = self.deployed.nodes.cluster.stream(path, {}, 20).data.decode()
        except (ApiRefused, HTTPError, OSError):  # no page yet
            return None
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("roundhouse_collect_finished")]
        return int(float(lines[0][2])) if lines else None

    def in_collection(self) -> int:
        """Wait until a collection is under way and has had the time to write rollouts down; how many are finished."""
        until(lambda: self.finished() or None, "a collection under way", seconds=SECONDS)
        time.sleep(FLUSH_SECONDS + 1)
        finished = self.finished() or 0
        assert 0 < finished < ROLLOUTS, "in its middle"
        return finished

    def in_training(self) -> str:
        """Wait until a trainer's pod runs; its name."""
        return str(until(lambda: self.pod_of("trainer"), "a trainer's pod", seconds=SECONDS))

    def shard(self, label: str) -> str:
        """Return the name of the pod that works on a shard, after it has reported finished rollouts."""

        def at_work() -> str | None:
            pod = self.pod_of("collector", f",roundhouse/shard={label}")
            return pod if pod is not None and re.search(r": [1-9]\d* of", self.deployed.nodes.log(pod)) else None

        return str(until(at_work, f"a pod of {label} that has finished rollouts", seconds=SECONDS))

    def pod_of(self, component: str, more: str = "") -> str | None:
        selector = f"app.kubernetes.io/component={component}{more}"
        for pod in self.deployed.nodes.found("pods", selector):
            if pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp"):
                return str(pod["metadata"]["name"])
        return None

    def end(self) -> Object:
        """Wait for the run's end; the attempts of its stages."""
        self.deployed.end(self.job, SECONDS)
        told: Object = self.deployed.ask(f"history-{self.run_id}", HISTORY, run=self.run_id)
        return told


HISTORY = """
import io, json, re
import pyarrow.parquet as pq
from roundhouse.store.location import Location
from roundhouse.store.run import load_run
from roundhouse.store.stage import read_entry, read_manifest, read_table
run = load_run("/store", open("/etc/roundhouse/run").read())
told = {"iterations": len(run.checkpoint_versions()) - 1, "stages": {}}
for number in range(1, run.config.iterations + 1):
    for name in ("refit", "collect", "validate", "train"):
        stage = run.stage(number, name)
        manifest = read_manifest(stage.reference())
        told["stages"][f"{number}/{name}"] = {
            "attempt": manifest.attempt, "counts": manifest.counts, "metrics": manifest.metrics,
            "started": manifest.started_at, "finished": manifest.finished_at,
        }
    # begun before the attempt that was committed: taken over from the one before it
    reference = run.stage(number, "collect").reference()
    collect = told["stages"][f"{number}/collect"]
    collect["kept"] = sum(at < collect["started"] for at in read_table(reference, "rollouts")["started_at"].to_pylist())
    collect["begun"] = {}
    for entry in read_manifest(reference).files:
        if found := re.match(r"rollouts-a\\d+-(s\\w+)-", entry.path):
            table = pq.read_table(io.BytesIO(read_entry(Location(reference.uri), entry)))
            collect["begun"].setdefault(found[1], []).extend(table["started_at"].to_pylist())
print(json.dumps(told))
"""


START = """
from roundhouse.config.loading import load_config
from roundhouse.stages.policy import starting_policy
from roundhouse.store.run import open_run
starting_policy(open_run(load_config("/etc/roundhouse/run.yaml")))
print("{}")
"""


@pytest.fixture(scope="module")
def policy(deployed: Deployed) -> Object:
    """Starting policy of all drills, also with a remote environment, which makes no policy itself."""
    tree = deployed.config("start", policy={"kind": "warm_start", "steps": 100})
    deployed.ask("start", START, **{"run.yaml": yaml.safe_dump(tree)})
    return {"kind": "pretrained", "path": "/store/runs/start/checkpoints/000000"}


def drill(deployed: Deployed, name: str, policy: Object, **changed: Any) -> Drill:
    """A run with collections that are long enough to be interrupted."""
    run_id = f"drill-{name}"
    rollout = {"prompts_per_iteration": ROLLOUTS // 8, "group_size": 8, "max_turns": 4, "concurrency": 1} | changed.pop(
        "rollout", {}
    )
    return Drill(deployed, run_id, deployed.train(run_id, rollout=rollout, policy=policy, **changed))


def judge(told: Object, unfinished: str, lost_at: float) -> None:
    """All iterations are there, and no stage but the one named is another attempt's than the first. Prints what each took."""
    stages = told["stages"]
    for name, one in stages.items():
        took, after = one["finished"] - one["started"], one["finished"] - lost_at
        print(
            f"  {name}: attempt {one['attempt']}, {took:.0f} s, ended {after:+.0f} s from the loss, kept {one.get('kept')}"
        )
    assert told["iterations"] == ITERATIONS
    assert list(stages) == [f"{number}/{stage}" for number in range(1, ITERATIONS + 1) for stage in STAGES]
    assert [name for name, one in stages.items() if one["attempt"] > 1] in ([], [unfinished])
    for number in range(1, ITERATIONS + 1):
        counts = stages[f"{number}/collect"]["counts"]
        print(f"  {number}: {counts}")
        assert counts["requested"] == ROLLOUTS
        assert counts["completed"] >= 0.8 * ROLLOUTS, "an outage costs at most rollout.max_failed_fraction"


def lose_in_collection(under: Drill, component: str) -> tuple[str, float]:
    """Delete the pod while rollouts are in flight; its name, and when."""
    before = under.in_collection()
    lost = under.flow_pod() if component == "flow" else under.pod_of(component)
    assert lost is not None
    under.deployed.delete_pod(lost)
    lost_at = time.time()
    print(f"{component} lost at {before} of {ROLLOUTS} rollouts")
    return lost, lost_at


def test_an_engine_that_is_lost_costs_its_start_and_the_rollouts_in_flight(deployed: Deployed, policy: Object) -> None:
    under = drill(deployed, "engine", policy)
    lost, lost_at = lose_in_collection(under, "engine")
    told = under.end()
    judge(told, "1/collect", lost_at)
    assert told["stages"]["1/collect"]["finished"] > lost_at, "it was lost in mid-collection"
    assert under.pod_of("engine") not in (None, lost)


def test_a_gym_server_that_is_lost_costs_the_episodes_in_flight(deployed: Deployed, policy: Object) -> None:
    until(lambda: deployed.running("gym"), "the gym server", seconds=SECONDS)
    under = drill(deployed, "gym", policy, environment=deployed.gym_environment())
    lost, lost_at = lose_in_collection(under, "gym")
    told = under.end()
    judge(told, "1/collect", lost_at)
    assert told["stages"]["1/collect"]["finished"] > lost_at, "it was lost in mid-collection"
    assert under.pod_of("gym") not in (None, lost)


def test_a_flow_that_is_lost_in_a_collection_makes_only_the_rest_of_it(deployed: Deployed, policy: Object) -> None:
    under = drill(deployed, "flow", policy)
    lost, lost_at = lose_in_collection(under, "flow")
    told = under.end()
    judge(told, "1/collect", lost_at)
    collect = told["stages"]["1/collect"]
    assert collect["attempt"] == 2
    assert 0 < collect["kept"] < ROLLOUTS, "what the first attempt had written down is in the second's dataset"
    assert under.flow_pod() != lost


def test_a_shard_that_is_lost_is_gone_on_with_by_the_next_job_and_the_other_does_not_notice(
    deployed: Deployed, policy: Object
) -> None:
    shards = {"kind": "job", "shards": 2, "timeout_seconds": SECONDS}
    under = drill(deployed, "shard", policy, rollout={"distribution": shards, "concurrency": 2}, collector={})
    before, lost = under.in_collection(), under.shard("s0001of0002")
    deployed.delete_pod(lost)
    lost_at = time.time()
    print(f"{lost} lost at {before} of {ROLLOUTS} rollouts of both")
    told = under.end()
    judge(told, "", lost_at)
    collect, undisturbed = told["stages"]["1/collect"], told["stages"]["2/collect"]
    kept = sum(at < lost_at for at in collect["begun"]["s0001of0002"])
    print(f"  of the lost shard's rollouts kept: {kept}; {collect['metrics']}")
    assert 0 < kept < ROLLOUTS // 2 == len(collect["begun"]["s0001of0002"])
    for one, lost_pods in ((collect, 1), (undisturbed, 0)):
        assert one["metrics"]["rollout/shards_lost"] == lost_pods
        assert one["metrics"]["rollout/kubernetes_calls"] <= 25
    jobs = deployed.nodes.found("jobs", f"roundhouse/run={under.run_id},roundhouse/stage=collect")
    made = Counter("{roundhouse/iteration} {roundhouse/shard}".format_map(job["metadata"]["labels"]) for job in jobs)
    assert made == {"1 s0001of0002": 2, "1 s0002of0002": 1, "2 s0001of0002": 1, "2 s0002of0002": 1}


@pytest.mark.parametrize("component", ["trainer", "flow"])
def test_a_pod_that_is_lost_in_training_costs_the_step(deployed: Deployed, policy: Object, component: str) -> None:
    under = drill(deployed, f"training-{component}", policy)
    trainer = under.in_training()
    deployed.delete_pod(trainer if component == "trainer" else under.flow_pod())
    lost_at = time.time()
    told = under.end()
    judge(told, "1/train", lost_at)
    assert told["stages"]["1/collect"]["finished"] < told["stages"]["1/train"]["started"]


def kubectl(*arguments: str) -> None:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_drained_node_costs_the_unfinished_part_of_one_stage(deployed: Deployed, policy: Object) -> None:
    """Cordoned, and every pod of the run evicted at once, as `kubectl drain` does it; other namespaces' pods stay."""
    under = drill(deployed, "drain", policy)
    in_use = {under.in_training(), under.flow_pod(), under.pod_of("engine"), under.pod_of("gym")} - {None}
    placed = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in deployed.nodes.found("pods") if running(pod)}
    nodes = sorted({placed[str(name)] for name in in_use})
    try:
        for node in nodes:
            kubectl("cordon", node)
        for name in in_use:
            deployed.nodes.evict(str(name))
        lost_at = time.time()
        until(
            lambda: not in_use & {pod["metadata"]["name"] for pod in deployed.nodes.found("pods") if running(pod)},
            "drained",
            seconds=300,
        )
        print(f"{len(in_use)} pods gone after {time.time() - lost_at:.0f} s")
    finally:
        for node in nodes:
            kubectl("uncordon", node)
    judge(under.end(), "1/train", lost_at)


def running(pod: Object) -> bool:
    return bool(pod["status"].get("phase") == "Running")
