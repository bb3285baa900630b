"""Pause, resume and cancel of a run that collects while it trains: both lanes stop and both continue. On a real Prefect
server.

The story happens once, on one run; each test is a claim about its observations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from roundhouse.collection import controller as happened
from roundhouse.collection.asynchronous.controller_journal import ControllerJournal
from roundhouse.collection.asynchronous.plan import Plan
from roundhouse.stages.collect import read_rollouts
from roundhouse.store.stage import MANIFEST
from tests.flows.served import Served
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

RUN, STALENESS = "overlapped", 1
OVERLAPPED = [f"asynchrony={{mode: batch-async, staleness: {STALENESS}}}", "evaluation.before_training=false"]
LONG = [*OVERLAPPED, "iterations=400"]
"""Prefect may tell a flow run of a pause only after ten seconds, in which dozens of these small iterations go by."""
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class Story:
    """Observations of the story."""

    served: Served
    paused: dict[str, Any] = field(default_factory=dict)
    complete_in_pause: list[str] = field(default_factory=list)
    tasks_after_cancel: list[str] = field(default_factory=list)
    flows_after_cancel: list[str] = field(default_factory=list)
    left_after_cancel: list[str] = field(default_factory=list)
    iterations: int = 0
    again: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(served: Served) -> Story:
    told = Story(served)
    flow_run = served.start("train", preset="small", run_id=RUN, overrides=LONG)
    until(lambda: _overlaps(served, 1), "collect 2 under way, 1 trained", evidence=lambda: served.evidence_of(flow_run))
    served.ask(flow_run, type="PAUSED", name="Suspended", state_details={"pause_reschedule": True})
    until(
        lambda: not served.processes(), "the end of the paused process", evidence=lambda: served.evidence_of(flow_run)
    )
    told.paused = served.call("GET", f"flow_runs/{flow_run}")
    told.complete_in_pause = _complete(served)
    # an iteration that the pause met stands in Prefect as at work, until the run goes on: its own task runs do not
    until(
        lambda: all(name.startswith("iteration-") for name in _at_work(served, "task_runs")),
        "Prefect's record of the end of the task runs, which comes after them",
        evidence=lambda: served.evidence_of(flow_run),
    )

    served.call("POST", f"flow_runs/{flow_run}/resume")
    reached = served.run(RUN).latest_checkpoint().policy_version
    until(
        lambda: _overlaps(served, reached + 1),
        "another step, and collecting beside it",
        evidence=lambda: served.evidence_of(flow_run),
    )
    processes = served.processes()
    served.ask(flow_run, type="CANCELLING")
    until(lambda: served.state(flow_run) == "CANCELLED", "the cancelled state")
    until(lambda: not served.processes(), "the end of all processes")
    told.left_after_cancel = [str(process) for process in processes if process.is_running()]
    until(
        lambda: not _at_work(served, "flow_runs") + _at_work(served, "task_runs"),
        "Prefect's clean-up, which comes every few seconds, and its record of it",
    )
    told.flows_after_cancel = sorted({flow["state"]["type"] for flow in _flow_runs(served)})
    told.tasks_after_cancel = _at_work(served, "task_runs")

    told.iterations = served.run(RUN).latest_checkpoint().policy_version + 2
    last = [*OVERLAPPED, f"iterations={told.iterations}"]
    told.again = served.wait(served.start("train", preset="small", run_id=RUN, overrides=last), *ENDED)
    return told


def test_a_pause_ends_both_lanes_and_frees_the_machine(story: Story) -> None:
    assert story.paused["state"]["type"] == "PAUSED"
    assert "iterations/000001/report/manifest.json" in story.complete_in_pause


def test_a_cancel_ends_both_lanes_every_process_and_every_flow_run(story: Story) -> None:
    assert story.left_after_cancel == []
    assert set(story.flows_after_cancel) <= {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}, "nothing at work"
    assert story.tasks_after_cancel == []


def test_both_lanes_go_on_and_nothing_is_lost_or_made_twice(story: Story) -> None:
    assert story.again["state"]["type"] == "COMPLETED", story.again["state"]
    run = story.served.run(RUN)
    plan = Plan(run)
    for k in range(1, story.iterations + 1):
        rollouts = read_rollouts(run.stage(k, "collect").reference())
        assert Counter(r.rollout_id for r in rollouts) == Counter(spec.rollout_id for spec in plan.specs(k))
        ages = {k - 1 - turn.policy_version for rollout in rollouts for turn in rollout.turns}
        assert min(ages) >= 0
        assert max(ages) <= STALENESS
    events = list(ControllerJournal(run.location / "asynchrony").events())  # as far back as they are kept
    finished = [event.iteration for event in events if isinstance(event, happened.TrainingFinished)]
    assert finished == list(range(finished[0], story.iterations + 1))


def _overlaps(served: Served, k: int) -> bool:
    """Return whether version k exists and the next collect stage has begun."""
    place = served.run(RUN) if (_directory(served) / "run.json").exists() else None
    if place is None or not place.is_reported(k):
        return False
    return place.stage(k + 1, "collect").location.exists("attempt-0001.json")


def _directory(served: Served) -> Any:
    return served.directory / "store" / "runs" / RUN


def _complete(served: Served) -> list[str]:
    return sorted(name for name in served.run(RUN).location.tree() if name.endswith(f"/{MANIFEST}"))


def _flow_runs(served: Served) -> list[dict[str, Any]]:
    return served.call("POST", "flow_runs/filter", flow_runs={"tags": {"all_": [f"run:{RUN}"]}})


def _at_work(served: Served, what: str) -> list[str]:
    """Names of the run's flow runs or task runs that Prefect believes to be at work."""
    flows = _flow_runs(served)
    if what == "flow_runs":
        return [flow["name"] for flow in flows if flow["state"]["type"] in ("RUNNING", "PENDING", "CANCELLING")]
    found = {
        "flow_run_id": {"any_": [flow["id"] for flow in flows]},
        "state": {"type": {"any_": ["RUNNING", "PENDING"]}},
    }
    return [task["name"] for task in served.call("POST", "task_runs/filter", task_runs=found)]
