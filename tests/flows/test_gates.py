"""Gates of a run: alerts that fire, a budget that pauses, a promotion that waits for approval; on a real server.

The story happens once, on one run with a served deployment. Its budget is used up before the second iteration. Its reward
collapses in the third, which needs approval; KL and mismatch exceed their low limits. Each automation calls a webhook of
this process; each test is a claim about its observations.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roundhouse.activity import Stalled
from roundhouse.config.operations import FailuresConfig
from roundhouse.stages.cost import raises
from roundhouse.store.run import Promoted, promoted_version
from roundhouse.store.stage import read_manifest
from roundhouse_flows.alerts import ALERTS, install, installed
from roundhouse_tasks.options import stage_boundary
from tests import fork_server
from tests.flows.served import CHROMIUM, PAGE_SECONDS, Served
from tests.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="needs chromium: apt-get install chromium"),
]

ROOT = Path(__file__).resolve().parents[2]
RUN = "gated"
ITERATIONS = 4
APPROVED = 3
"""The version that a person is asked about: the first evaluated after the starting policy."""
OVERRIDES = [
    f"iterations={ITERATIONS}",
    f"evaluation.every={APPROVED}",
    "evaluation.approval.required=true",
    "evaluation.approval.while_pending=block",
    "cost.budget.generated_tokens=1",
    "alerts.reward_window=1",
    "train.algorithm.kl_coefficient=0.01",
    "alerts.kl_above=1e-12",
    "alerts.mismatch_above=1.000000000001",
    "alerts.audit_refused_above=0",
]


@dataclass
class Story:
    """Observations of the story."""

    served: Served
    told: list[dict[str, Any]] = field(default_factory=list)
    """What the webhook was called with."""
    shipped: dict[str, list[str]] = field(default_factory=dict)
    budget_forms: list[str] = field(default_factory=list)
    versions_at_budget: list[int] = field(default_factory=list)
    processes_while_waiting: list[int] = field(default_factory=list)
    questions: list[dict[str, Any]] = field(default_factory=list)
    promoted_while_waiting: int | None = None
    page: str = ""
    """What the form in the browser said."""
    ended: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)

    def alerts(self) -> list[str]:
        return [each["alert"] for each in self.told]


@pytest.fixture(scope="module")
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A URL, and the JSON bodies that were sent to it."""
    bodies: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", bodies
    server.shutdown()


@pytest.fixture(scope="module")
def story(served: Served, webhook: tuple[str, list[dict[str, Any]]]) -> Story:
    url, bodies = webhook
    told = Story(served, bodies)
    with served.at_prefect():
        told.shipped = {each.name: [action.type for action in each.actions] for each in installed()}
        install(url)
    directory = served.directory / "fading"
    directory.mkdir()
    environment = {"kind": "custom", "target": "tests.flows.fading:Fading"}
    environment["parameters"] = {"directory": str(directory), "good": 8, "poor": 2}
    environment["audit"] = {"criteria": {"earned": {"function": "tests.flows.fading:never"}}}
    overrides = [f"environment={json.dumps(environment)}", *OVERRIDES]
    told.failed = served.wait(
        served.start("train", preset="small", run_id="wrong", overrides=["train.no_such=1"]), "FAILED"
    )
    flow_run = served.start("train", preset="small", run_id=RUN, overrides=overrides)
    _raise_the_budget(told, flow_run)
    _approve(told, flow_run)
    told.ended = served.wait(flow_run, "COMPLETED", "FAILED", "CRASHED")
    _stall(told)
    wanted = {kind.name for kind in ALERTS} - {"uneven_failures"}  # no rollout of this story fails
    until(lambda: wanted <= set(told.alerts()), "the webhook called for every alert", evidence=lambda: str(told.told))
    return told


def test_up_ships_every_alert_as_an_automation_that_needs_no_account(story: Story) -> None:
    assert story.shipped == {kind.automation: ["do-nothing"] for kind in ALERTS}


def test_every_alert_fires_and_names_the_run_and_what_was_seen(story: Story) -> None:
    said = {each["alert"]: each for each in story.told}
    assert said["failed_run"]["run"] == story.failed["name"]
    for name in ("stall", "budget_reached", "reward_collapse", "kl", "mismatch", "reward_hacking", "approval_wanted"):
        assert said[name]["run"] == RUN, name
    assert "nothing has moved for 0.5 s" in said["stall"]["message"]
    assert "of cost.budget.generated_tokens=1 are used" in said["budget_reached"]["message"]
    assert "was 1" in said["reward_collapse"]["message"]
    assert "above 1e-12" in said["kl"]["message"]
    assert "train/token_mult_prob_error" in said["mismatch"]["message"]
    assert "rewarded rollouts" in said["reward_hacking"]["message"]


def test_an_alert_is_told_once_while_it_holds(story: Story) -> None:
    for name in ("reward_collapse", "kl", "mismatch", "reward_hacking", "stall", "budget_reached", "approval_wanted"):
        assert story.alerts().count(name) == 1, name


def test_a_reached_budget_pauses_without_a_process_until_a_person_has_raised_it_enough(story: Story) -> None:
    assert story.processes_while_waiting == [0, 0, 0]
    assert story.versions_at_budget == [1, 1], "it asks again when what was given is not enough"
    assert "too much" in story.budget_forms[0]
    run = story.served.run(RUN)
    assert [(each.limits, each.by, each.comment) for each in raises(run)] == [
        ({"generated_tokens": 2.0}, "Ada", "a little"),
        ({"generated_tokens": 1e6}, raises(run)[1].by, "all of it"),
    ]


def test_a_promotion_waits_for_a_persons_yes_which_is_kept_with_its_comment(story: Story) -> None:
    assert story.promoted_while_waiting == 0
    assert f"Promote version {APPROVED} of run {RUN}?" in story.page
    assert "against version 0" in story.page
    assert story.ended["state"]["type"] == "COMPLETED", story.ended["state"]
    run = story.served.run(RUN)
    assert promoted_version(run) == APPROVED
    pointer = Promoted.model_validate_json(run.location.read("promoted.json"))
    assert pointer.approval == "approved by Grace: seen by eye"
    approval = read_manifest(run.stage(APPROVED, "approval").reference())
    assert approval.inputs == {"decision": run.stage(APPROVED, "promote").reference()}
    assert [question["state"]["type"] for question in story.questions] == ["PAUSED"]


def _stall(told: Story) -> None:
    """A stage in which nothing moves, at the border that every stage has, in a flow run of this process."""
    from prefect import flow

    run = told.served.run(RUN)
    run = replace(run, config=run.config.model_copy(update={"failures": FailuresConfig(stall_seconds=0.5)}))

    @flow(name="stalls")
    def stalls() -> None:
        stage_boundary("collect", lambda run, iteration: threading.Event().wait(60))(run, 1)

    with told.served.at_prefect(), pytest.raises(Stalled):
        stalls()


def _raise_the_budget(told: Story, flow_run: str) -> None:
    served = told.served
    _paused(told, flow_run)
    told.budget_forms.append(_description(served, flow_run))
    told.versions_at_budget.append(served.run(RUN).latest_checkpoint().policy_version)
    given = {"generated_tokens": 2, "comment": "a little", "name": "Ada"}
    reply = served.call("POST", f"flow_runs/{flow_run}/resume", run_input=given)
    assert reply["status"] == "ACCEPT", reply
    until(lambda: len(raises(served.run(RUN))) == 1, "the raise in the store")
    _paused(told, flow_run)
    told.versions_at_budget.append(served.run(RUN).latest_checkpoint().policy_version)
    command = [sys.executable, "-c", "from roundhouse.cli import main; main()", "runs", "resume", RUN]
    command += ["--store", served.store, "--budget", "generated_tokens=1e6", "--comment", "all of it"]
    environment = os.environ | served.services.environment() | {"PYTHONPATH": str(ROOT)}
    done = fork_server.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=served.directory)
    assert "continues" in done.stdout, done


def _approve(told: Story, flow_run: str) -> None:
    served = told.served
    _paused(told, flow_run)
    told.promoted_while_waiting = promoted_version(served.run(RUN))

    def asked() -> list[dict[str, Any]]:
        deployment = served.deployment("approve")["id"]
        found = served.call("POST", "flow_runs/filter", deployments={"id": {"any_": [deployment]}})
        return [each for each in found if each["state"]["type"] == "PAUSED"]

    until(lambda: len(asked()) == 1, "the question in Prefect", evidence=lambda: served.evidence_of(flow_run))
    told.questions = asked()
    url = f"{served.services.prefect_ui_url}/runs/flow-run/{told.questions[0]['id']}"
    until(lambda: _inputs(served, told.questions[0]["id"]) >= 2, "the form in Prefect")
    told.page = _say_yes(served, url, comment="seen by eye", name="Grace")


def _say_yes(served: Served, url: str, comment: str, name: str) -> str:
    """Resume the flow run through its page and return the text of the form."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1200})
        page.set_default_timeout(PAGE_SECONDS)
        served.sign_in(page)
        page.goto(url, wait_until="domcontentloaded")
        page.get_by_role("button", name="Resume").first.click()
        form = page.get_by_role("dialog")
        form.get_by_text("Promote version").wait_for()
        said = form.inner_text()
        choice = form.locator(".p-select-button__control")
        choice.focus()
        choice.press("Space")
        page.locator(".p-select-option", has_text="approve").first.click()
        form.locator("textarea").nth(0).fill(comment)
        form.locator("textarea").nth(1).fill(name)
        if folder := os.environ.get("ROUNDHOUSE_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/approval-form.png")
        with page.expect_response(lambda response: response.url.endswith("/resume")):
            form.get_by_role("button", name="Submit").click()
        browser.close()
    return said


def _inputs(served: Served, flow_run: str) -> int:
    """Return the parts of a form that Prefect has stored; a flow run is suspended a moment earlier."""
    return len(served.call("POST", f"flow_runs/{flow_run}/input/filter", prefix="suspended", limit=50))


def _paused(told: Story, flow_run: str) -> None:
    """Wait until the flow run waits for a person, and its process is gone."""
    told.served.wait(flow_run, "PAUSED")
    until(lambda: not told.served.processes(), "the end of the process")
    told.processes_while_waiting.append(len(told.served.processes()))


def _description(served: Served, flow_run: str) -> str:
    found = served.call("POST", f"flow_runs/{flow_run}/input/filter", prefix="suspended", limit=50)
    return " ".join(each["value"] for each in found if each["key"].endswith("-description"))
