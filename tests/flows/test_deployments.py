"""Deployments used through Prefect: run, pause, resume, retry, cancel, run again, fork.

The story happens once, on a real Prefect server with a served deployment; each test is a claim about its observations. It
is one run: paused after the first iteration, failed in a later training by a fault planted meanwhile, cancelled after that
iteration.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roundhouse.cpu import slowness
from roundhouse.store.run import Run
from roundhouse.store.stage import MANIFEST, read_manifest
from roundhouse_flows import controls
from tests.flows.served import Served
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

RUN = "story"
LONG = 400
"""Iterations: Prefect may tell a flow run of a pause only after ten seconds, in which dozens of these small ones go by."""
STAGES = ("refit", "collect", "validate", "train", "report")


@dataclass
class Story:
    """Observations of the story."""

    served: Served
    flow_run: dict[str, Any] = field(default_factory=dict)
    paused: dict[str, Any] = field(default_factory=dict)
    paused_at: dict[str, float] = field(default_factory=dict)
    still_paused_at: dict[str, float] = field(default_factory=dict)
    processes_in_pause: int = -1
    faulty: int = 0
    """The iteration that fails."""
    failed: dict[str, Any] = field(default_factory=dict)
    complete_at_failure: dict[str, float] = field(default_factory=dict)
    retried: dict[str, Any] = field(default_factory=dict)
    cancel_seconds: float = 0.0
    """On an idle machine."""
    left_after_cancel: list[str] = field(default_factory=list)
    sub_flows_after_cancel: list[str] = field(default_factory=list)
    complete_at_cancel: dict[str, float] = field(default_factory=dict)
    iterations: int = 0
    """Of the run, in the end."""
    again: dict[str, Any] = field(default_factory=dict)
    fork: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(served: Served) -> Story:
    told = Story(served)
    _pause_and_resume(told)
    _fail_and_retry(told)
    _cancel_and_run_again(told)
    _fork(told)
    return told


def test_a_pause_takes_effect_at_a_stages_border_and_frees_the_machine(story: Story) -> None:
    assert story.paused["state"]["type"] == "PAUSED"
    assert story.still_paused_at == story.paused_at
    assert story.processes_in_pause == 0


def test_a_resumed_run_goes_on_where_it_was(story: Story) -> None:
    assert story.paused_at
    for name, finished in story.paused_at.items():
        assert _manifest(story, name).finished_at == finished, f"{name} was done again"
    assert story.failed["id"] == story.flow_run["id"], "the same flow run, which `resume.mode: disable` does not refuse"


def test_retry_of_a_failed_run_goes_on_at_the_failed_stage(story: Story) -> None:
    assert "train" in story.failed["state"]["message"] or f"{story.faulty:06d}" in story.failed["state"]["message"]
    assert _names(story.complete_at_failure, story.faulty) == ["collect", "refit", "validate"]
    for name, finished in story.complete_at_failure.items():
        assert _manifest(story, name).finished_at == finished, f"{name} was done again"


def test_cancel_ends_every_process_in_time_and_the_sub_flows_too(story: Story) -> None:
    assert story.cancel_seconds < 30
    assert story.left_after_cancel == []
    assert set(story.sub_flows_after_cancel) <= {"COMPLETED", "FAILED", "CANCELLED"}


def test_a_cancelled_run_is_continued_by_another_flow_run(story: Story) -> None:
    assert story.again["id"] != story.flow_run["id"]
    for name, finished in story.complete_at_cancel.items():
        assert _manifest(story, name).finished_at == finished, f"{name} was done again"
    run = story.served.run(RUN)
    assert run.latest_checkpoint().policy_version == story.iterations
    for iteration in range(1, story.iterations + 1):
        for stage in STAGES:
            assert run.stage(iteration, stage).reference() is not None, (iteration, stage)


def test_flow_runs_carry_the_runs_name_and_tag(story: Story) -> None:
    assert story.again["name"] == f"train {RUN}"
    assert {f"run:{RUN}", "team:search"} <= set(story.again["tags"])
    assert story.fork["name"] == f"fork {RUN} as wide"
    assert {"run:wide"} <= set(story.fork["tags"])


def test_a_fork_from_the_form_trains_on_from_the_parents_iteration(story: Story) -> None:
    fork = story.served.run("wide")
    assert fork.parent.version == story.iterations
    assert fork.latest_checkpoint().policy_version == story.iterations + 1
    assert fork.config.rollout.group_size == 3


def _pause_and_resume(told: Story) -> None:
    served = told.served
    flow_run = served.start("train", preset="small", run_id=RUN, iterations=LONG, overrides=["resume.mode=disable"])
    until(lambda: _reported(served, 1), "the first iteration", evidence=lambda: served.evidence_of(flow_run))
    served.ask(flow_run, type="PAUSED", name="Suspended", state_details={"pause_reschedule": True})
    until(
        lambda: not served.processes(), "the end of the paused process", evidence=lambda: served.evidence_of(flow_run)
    )
    told.paused = served.call("GET", f"flow_runs/{flow_run}")
    told.processes_in_pause = len(served.processes())
    told.paused_at = _finished(served.run(RUN))
    time.sleep(2)
    told.still_paused_at = _finished(served.run(RUN))
    told.faulty = served.run(RUN).latest_checkpoint().policy_version + 2
    _obstacle(told).parent.mkdir(parents=True)
    _obstacle(told).touch()
    served.call("POST", f"flow_runs/{flow_run}/resume")
    told.flow_run = {"id": flow_run}


def _fail_and_retry(told: Story) -> None:
    served, flow_run = told.served, told.flow_run["id"]
    told.failed = served.wait(flow_run, "FAILED", "CRASHED", "COMPLETED")
    told.complete_at_failure = _finished(served.run(RUN))
    until(lambda: not served.processes(), "the end of the failed process")
    _obstacle(told).unlink()
    with served.at_prefect():
        assert controls.resume(RUN) == flow_run, "what the page's Retry does, by `runs resume`"


def _cancel_and_run_again(told: Story) -> None:
    served, flow_run = told.served, told.flow_run["id"]
    until(
        lambda: _reported(served, told.faulty),
        "the iteration that had failed",
        evidence=lambda: served.evidence_of(flow_run),
    )
    processes = served.processes()
    asked = time.monotonic()
    served.ask(flow_run, type="CANCELLING")
    until(lambda: served.state(flow_run) == "CANCELLED", "the cancelled state")
    until(lambda: not served.processes(), "the end of all processes")
    told.cancel_seconds = (time.monotonic() - asked) / slowness()  # other tests take the cores meanwhile
    told.left_after_cancel = [str(process) for process in processes if process.is_running()]

    def states() -> list[str]:
        subs = served.call("POST", "flow_runs/filter", flow_runs={"parent_flow_run_id": {"any_": [flow_run]}})
        return [sub["state"]["type"] for sub in subs]

    until(
        lambda: not {"RUNNING", "PENDING"} & set(states()),
        "Prefect's clean-up, which comes every few seconds",
    )
    told.sub_flows_after_cancel = states()
    told.complete_at_cancel = _finished(served.run(RUN))
    told.iterations = served.run(RUN).latest_checkpoint().policy_version + 2
    again = served.start("train", preset="small", run_id=RUN, iterations=told.iterations)
    told.again = served.wait(again, "COMPLETED", "FAILED", "CRASHED")
    assert told.again["state"]["type"] == "COMPLETED", told.again["state"]


def _fork(told: Story) -> None:
    served = told.served
    parent = {"run_id": RUN, "store": served.store}
    fork = served.start("fork", **parent, new_run_id="wide", iterations=told.iterations + 1, group_size=3)
    told.fork = served.wait(fork, "COMPLETED", "FAILED", "CRASHED")


def _obstacle(told: Story) -> Path:
    """A file where the directory of an iteration's train stage should be."""
    return Path(told.served.store) / f"runs/{RUN}/iterations/{told.faulty:06d}/train"


def _reported(served: Served, iteration: int) -> bool:
    return (Path(served.store) / f"runs/{RUN}/iterations/{iteration:06d}/report/{MANIFEST}").exists()


def _complete(run: Run) -> list[str]:
    return sorted(name for name in run.location.tree() if name.endswith(f"/{MANIFEST}"))


def _finished(run: Run) -> dict[str, float]:
    """When each complete stage of the iterations was finished."""
    found = {}
    for name in _complete(run):
        if name.startswith("iterations/"):
            _, number, stage, _ = name.split("/")
            found[name] = read_manifest(run.stage(int(number), stage).reference()).finished_at
    return found


def _manifest(story: Story, name: str) -> Any:
    _, number, stage, _ = name.split("/")
    return read_manifest(story.served.run(RUN).stage(int(number), stage).reference())


def _names(complete: dict[str, float], iteration: int) -> list[str]:
    return sorted(name.split("/")[2] for name in complete if name.split("/")[1] == f"{iteration:06d}")
