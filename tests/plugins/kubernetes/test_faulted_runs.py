"""Whole runs with an API server that fails most calls: the same bytes as with one that never fails.

The real command with a real Prefect server, engine and environment; its training steps are Jobs with processes of this
machine as pods. A proxy in front of the API server fails most calls, by a seed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from roundhouse.store.run import Run, load_run
from roundhouse.store.stage import Manifest, read_manifest
from tests.chaos.outcome import Outcome
from tests.chaos.stand import Stand as Machine
from tests.chaos.stand import stand as machine_stand
from tests.fork_server import ForkedProgram
from tests.plugins.kubernetes import stand as stands
from tests.plugins.kubernetes.fault_plan import DECKS, FaultPlan
from tests.plugins.kubernetes.players import variables_of
from tests.plugins.kubernetes.stand import Stand

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

Object = dict[str, Any]

ITERATIONS = 3
SECONDS = 600.0
"""For a run; a busy machine takes minutes."""


@dataclass
class Played:
    """A run that has ended."""

    run: Run
    outcome: Outcome
    jobs: list[Object]
    pods: list[str]
    seen: list[tuple[str, str]]
    """Calls that reached the proxy, by method and path."""
    log: str

    def steps(self) -> list[Manifest]:
        """The manifests of its training steps."""
        found = []
        for k in range(1, ITERATIONS + 1):
            reference = self.run.stage(k, "train").reference()
            assert reference is not None, f"iteration {k}\n{self.log}"
            found.append(read_manifest(reference))
        return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine_stand(tmp_path_factory.mktemp("machine"), iterations=ITERATIONS, tracked=False) as built:
        yield built


@pytest.fixture(scope="module")
def unfaulted(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Played:
    with stands.fake_stand(tmp_path_factory.mktemp("whole")) as whole:
        return play(machine, whole, "whole")


def play(machine: Machine, stand: Stand, run_id: str) -> Played:
    """`roundhouse train` to its end, with its training steps as Jobs of the stand."""
    stand.kubelet.behave = lambda pod: run_as_fork(machine, stand, pod)
    trainer = {"cpu": "100m", "memory": "64Mi", "scratch": "1Gi", "shared_memory": "16Mi"}
    infra = machine.settings["infra"] | {"kind": "kubernetes", "namespace": stand.namespace, "trainer": trainer}
    train = machine.settings["train"] | {"service": {"kind": "process"}}
    tracking = {"enabled": False, "labels": {"team": "search"}}
    infra["store_claim"] = "store"
    configuration = machine.configuration(run_id, train=train, infra=infra, tracking=tracking)
    began = machine.train(configuration, {"KUBECONFIG": str(stand.kubeconfig)})
    assert isinstance(began, ForkedProgram)
    try:
        code = began.wait(SECONDS)
    finally:
        began.kill()
    log = (machine.directory / f"{run_id}.log").read_text()[-6000:]
    assert code == 0, log
    run = load_run(machine.settings["store"], run_id)
    return Played(run, Outcome.of(run), stand.found("jobs"), stand.kubelet.pods, list(stand.faults.seen), log)


def run_as_fork(machine: Machine, stand: Stand, pod: Object) -> None:
    """Run a pod as a fork of a process with all imports done."""
    _, module, *arguments = pod["spec"]["containers"][0]["args"]
    log = machine.directory / f"{pod['metadata']['name']}.log"
    log.touch()
    stand.kubelet.run(pod)
    assert machine.fork_server is not None
    child = machine.fork_server.start(module, arguments, log, variables_of(pod))
    try:
        with log.open() as lines:
            deadline = time.monotonic() + SECONDS
            while (code := child.poll()) is None and time.monotonic() < deadline:
                stand.kubelet.say(pod, lines.read())
                time.sleep(0.05)
            stand.kubelet.say(pod, lines.read())
        stand.kubelet.exit(pod, 1 if code is None else code)
    finally:
        with suppress(ProcessLookupError):
            child.kill()


def test_a_run_whose_api_server_fails_most_calls_ends_in_the_same_bytes(
    machine: Machine, stand: Stand, unfaulted: Played
) -> None:
    plan = stand.faults.plan = FaultPlan(seed=3)
    played = play(machine, stand, f"faulted-{stand.namespace}")
    assert played.outcome.differences(unfaulted.outcome) == []
    assert unfaulted.outcome.problems == []
    assert_one_job_a_step(played)
    assert_calls_are_bounded_and_reported(played, unfaulted, plan)
    assert_every_fault_happened(plan)


def test_the_run_without_faults_is_what_it_is_held_against(unfaulted: Played) -> None:
    assert unfaulted.outcome.problems == []
    assert_one_job_a_step(unfaulted)
    assert sum(step.metrics["train/kubernetes_calls"] for step in unfaulted.steps()) == len(unfaulted.seen)


def assert_one_job_a_step(played: Played) -> None:
    steps = [job["metadata"]["labels"]["roundhouse/iteration"] for job in played.jobs]
    assert sorted(steps) == [str(k) for k in range(1, ITERATIONS + 1)]
    for job in played.jobs:
        assert {each["metadata"]["labels"]["team"] for each in (job, job["spec"]["template"])} == {"search"}
        assert [item["type"] for item in job["status"]["conditions"] if item["status"] == "True"][-1] == "Complete", job
    assert len(played.pods) == ITERATIONS
    assert [step.attempt for step in played.steps()] == [1] * ITERATIONS, "no fault was the stage's to repeat"


def assert_calls_are_bounded_and_reported(played: Played, unfaulted: Played, plan: FaultPlan) -> None:
    """A failed call costs at most two more: the result of a lost reply is looked up, and a lost watch begins with a list."""
    reported = sum(step.metrics["train/kubernetes_calls"] for step in played.steps())
    assert reported == len(played.seen) == plan.calls.total()
    assert reported <= len(unfaulted.seen) + 2 * plan.drawn.total(), (plan.calls, Counter(unfaulted.seen))


def assert_every_fault_happened(plan: FaultPlan) -> None:
    wanted = {(verb, fault.status) for verb, faults in DECKS.items() for fault in faults}
    assert set(plan.drawn) == wanted
