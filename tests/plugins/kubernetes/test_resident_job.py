"""Resident ranks on a cluster: a Job with pods that hold the model across iterations, behind the flow's verbs.

The test has no nodes: its kubelet runs the container's command as a process of this machine.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from roundhouse.config.loading import parse_config
from roundhouse.errors import ConfigError, InfraError
from roundhouse.launch.base import Launcher, Program, Stopped, open_launcher
from roundhouse.launch.resident_ranks import ResidentRanks
from roundhouse.plugins.kubernetes import stage_jobs
from roundhouse.plugins.kubernetes.names import StageIdentity
from roundhouse.plugins.kubernetes.stage_jobs import TrainJob
from roundhouse.stages import trainer_home
from roundhouse.stages.checkpoint import publish
from roundhouse.stages.policy import starting_policy
from roundhouse.stages.train import train_iteration
from roundhouse.stages.trainers import open_service
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from tests.launch.program import Does
from tests.plugins.kubernetes.stand import Stand
from tests.plugins.kubernetes.test_train_job import cluster_run
from tests.stages.test_train import checkpoint_digests, make_run, sequences
from tests.waiting import until

pytestmark = pytest.mark.real


def resident_run(stand: Stand, store: str, tmp_path: Path, patch: pytest.MonkeyPatch, **trainer: Any) -> Run:
    return cluster_run(stand, store, tmp_path, patch, service={"kind": "resident", "launcher": "kubernetes"}, **trainer)


def trained(run: Run, tmp_path: Path) -> list[dict[str, str]]:
    """Files of two iterations."""
    base, found = starting_policy(run), []
    for iteration in (1, 2):
        base = publish(run, train_iteration(run, iteration, sequences(run, iteration), base, tmp_path / "cache"))
        found.append(checkpoint_digests(base))
    return found


@pytest.mark.long
def test_a_pod_that_stays_writes_what_a_resident_trainer_writes_and_goes_with_its_trainer(
    fake: Stand, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(make_run(f"{bucket}/here", tmp_path), tmp_path)
    run = resident_run(fake, f"{bucket}/pod", tmp_path, monkeypatch)
    assert trained(run, tmp_path) == expected
    assert len(fake.kubelet.pods) == 1, "kept between iterations"
    (job,) = fake.found("jobs")
    assert job["spec"]["activeDeadlineSeconds"] == stage_jobs.SERVER_SECONDS
    trainer_home.release_trainers()
    until(lambda: fake.found("jobs") == [])


@pytest.mark.long
def test_a_pod_that_is_killed_is_named_and_the_next_attempt_starts_another(
    fake: Stand, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resident_run(fake, bucket, tmp_path, monkeypatch)
    base, batch = starting_policy(run), sequences(run, 1)
    service = open_service(run.config.train, owner=run.uid, temperature=1.0, at=(run, 1))
    assert isinstance(service, ResidentRanks)
    (process,) = fake.kubelet.processes.values()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(InfraError, match=r"lost in the session: Pod .*train-ranks"):
        service.facts()
    service.close()
    train_iteration(run, 1, batch, base, tmp_path / "cache")
    trainer_home.release_trainers()
    assert len(fake.kubelet.pods) == 2


class Waiting:
    """A program of a launcher that waits in a thread until it is stopped, and its outcome."""

    def __init__(self, launcher: Launcher, place: str, digest: str) -> None:
        self.ended: BaseException | None = None
        self.stopped, self._said = threading.Event(), threading.Event()
        program = Program(
            what="Ranks", module="tests.launch.program", spec=Does(does="wait"), place=Location(f"{place}/{digest}"),
            place_field="place", stage="train", timeout_seconds=threading.TIMEOUT_MAX, timeout_key="a.key", digest=digest,
            label="ranks", stays=True,
        )  # fmt: skip

        def run() -> None:
            try:
                launcher.run(program, lambda line: self._said.set(), self.stopped)
            except (InfraError, Stopped) as error:
                self.ended = error

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert self._said.wait(30)

    def end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_ranks_that_a_killed_flow_left_are_ended_before_others_start(
    stand: Stand, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, key = resident_run(stand, bucket, tmp_path, monkeypatch), "train.service.launcher"
    with open_launcher("kubernetes", key, run) as before, open_launcher("kubernetes", key, run) as launcher:
        left = Waiting(before, bucket, "1" * 32)
        (old,) = stand.found("jobs")
        own = Waiting(launcher, bucket, "2" * 32)
        (now,) = stand.found("jobs")
        assert now["metadata"]["uid"] != old["metadata"]["uid"]
        left.end()
        assert "was deleted by another client" in str(left.ended)
        own.stopped.set()
        own.end()
        assert isinstance(own.ended, Stopped)
    assert stand.found("jobs") == []


def test_the_pods_of_ranks_know_their_address_and_end_with_the_flow() -> None:
    run = make_tree({"pods": 2, "restarts": 3})
    flow = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "flow", "uid": "f"}}
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "run", "uid": "o"}}
    plan = TrainJob(
        StageIdentity("r", "0123456789ab", 1, "train", "89abcdef0123", "ranks"), run.infra, run.train.service,
        reports="s3://b/r", module="roundhouse.training.service.ranks", stays=True, flow=flow, store="s3://b",
    )  # fmt: skip
    job = plan.job(1, owner)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    address = {"name": "ROUNDHOUSE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    assert address in container["env"]
    assert container["args"][-3:] == ["roundhouse.training.service.ranks", "--spec", f"{plan.report(1)}/spec.json"]
    assert job["metadata"]["ownerReferences"][0]["uid"] == "f"
    assert job["spec"]["backoffLimit"] == 0, "what a pod held is lost with it"
    assert not [item for item in container["env"] if "TOKEN" in item["name"]]


def make_tree(trainer: dict[str, Any]) -> Any:
    infra = {"kind": "kubernetes", "trainer": trainer}
    train = {"service": {"kind": "resident", "launcher": "kubernetes", "processes": 2}}
    return parse_config({"run_id": "r", "store": "s3://b/s", "infra": infra, "train": train})


def test_a_resident_trainer_on_a_cluster_needs_one() -> None:
    train = {"service": {"kind": "resident", "launcher": "kubernetes"}}
    with pytest.raises(ConfigError, match=r"train.service.launcher is kubernetes, but infra.kind is local"):
        parse_config({"run_id": "r", "store": "s3://b/s", "train": train})
