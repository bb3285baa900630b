"""A collection that runs ahead of training over Jobs: a lost pod costs its shard, and a stopped lane leaves no Job.

The test has no nodes: its kubelet runs the container's command as a process of this machine.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.shards import split
from roundhouse.config.loading import parse_config
from roundhouse.store.run import open_run
from roundhouse.store.stage import read_manifest
from roundhouse.training.service.job_entry import REPORT
from roundhouse.trajectories.records import derive_seed
from tests import fork_server
from tests.asynchrony.test_rolling_shards import Collecting, Lane, VersionedEngine, check_journal, made
from tests.asynchrony.test_rolling_shards import engine as engine
from tests.plugins.kubernetes.players import run_container
from tests.plugins.kubernetes.stand import Stand
from tests.plugins.kubernetes.test_shard_jobs import settings, shard_of
from tests.stages.test_distributed import TASKS
from tests.stages.test_interrupted_collect import CALLS, GROUP
from tests.waiting import until

pytestmark = pytest.mark.real

Object = dict[str, Any]


def test_jobs_run_ahead_a_preempted_pod_costs_its_shard_and_a_stopped_lane_leaves_none(
    fake: Stand, tmp_path: Path, engine: VersionedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig))
    asynchrony = {"mode": "batch-async", "staleness": 1}
    tree = settings(fake.namespace, f"{tmp_path}/store", 2) | {"asynchrony": asynchrony, "evaluation": {"every": 0}}
    run = open_run(parse_config(tree))
    lane = Lane(run, engine)
    first_half, second_half = [shard.specs for shard in split(lane.plan.specs(2), 2)]
    engine.silent = calls = {derive_seed(spec.seed, n) for spec in lane.plan.specs(2) for n in range(CALLS)}
    preempted = threading.Event()

    def behave(pod: Object) -> None:
        iteration = pod["metadata"]["labels"]["roundhouse/iteration"]
        if (iteration, shard_of(pod)) != ("2", "s0002of0002") or preempted.is_set():
            run_container(fake.kubelet, pod)
            return
        fake.kubelet.run(pod)
        process = fork_server.start([sys.executable, *pod["spec"]["containers"][0]["args"]], stdout=subprocess.DEVNULL)
        try:
            until(lambda: engine.version == 1)
        finally:
            process.kill()
            process.wait()
        preempted.set()
        fake.kubelet.disrupt(pod, "PreemptionByScheduler")

    fake.kubelet.behave = behave
    lane.transfer(0)
    first, ahead = Collecting(lane, 1), Collecting(lane, 2)
    manifest = read_manifest(first.result())
    assert made(run, 1) == {spec.rollout_id: spec.seed for spec in lane.plan.specs(1)}
    assert manifest.details["distribution"]["kind"] == "job"
    assert manifest.metrics["rollout/kubernetes_calls"] > 0
    lane.train(1)
    until(lambda: lane.at_work() == {(2, "s0001of0002"), (2, "s0002of0002")})
    lane.transfer(1)
    until(lambda: preempted.is_set())
    engine.silent = calls - {derive_seed(spec.seed, n) for spec in second_half for n in range(CALLS)}
    until(lambda: len(engine.answered) == len(calls) + len(second_half) * CALLS)
    until(lambda: lane.at_work() == {(2, "s0001of0002")})
    assert [shard_of(job) for job in under_way(fake)] == ["s0001of0002"]
    lane.runner.stop()
    assert ahead.was_ended()
    assert under_way(fake) == []

    events = check_journal(run)
    evicted = Counter(event.reason for event in events if isinstance(event, happened.RolloutEvicted))
    assert evicted == {"its worker was lost": len(second_half), "its stage was cancelled": len(first_half)}
    finished = [event for event in events if isinstance(event, happened.RolloutFinished)]
    assert len(finished) == TASKS * GROUP + len(second_half)
    versions = {
        lane.controller.pool.groups[event.position].versions[event.sample] for event in finished[TASKS * GROUP :]
    }
    assert versions == {1}, "the preempted shard was admitted again, on what the engine holds now"
    reports = [name for name in run.stage(2, "collect").location.tree() if name.endswith(f"/{REPORT}")]
    assert len(reports) == 1


def under_way(stand: Stand) -> list[Object]:
    return [job for job in stand.found("jobs") if not (job.get("status") or {}).get("conditions")]
