"""The form of the `train` deployment in the Prefect page, in a real browser: its fields are seen, and start a run."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.flows.served import Served
from tests.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

SHOWN = (
    "Preset",
    "Run Id",
    "Iterations",
    "Seed",
    "Learning Rate",
    "Group Size",
    "Temperature",
    "Keep Last",
    "Resume",
    "Overrides",
    "Optimizer steps an iteration.",  # the help of a field
)


def test_a_run_is_started_from_the_form(page: Any, served: Served) -> None:
    deployment = served.deployment("train")["id"]
    page.goto(served.services.prefect_sign_in_url)  # the browser keeps the password
    page.wait_for_url(f"{served.services.prefect_ui_url}/dashboard")
    page.goto(
        f"{served.services.prefect_ui_url}/deployments/deployment/{deployment}/run", wait_until="domcontentloaded"
    )
    until(lambda: not _missing(page), "every field", evidence=lambda: f"{_missing(page)} of {page.inner_text('body')}")
    if folder := os.environ.get("ROUNDHOUSE_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/run-form.png")
    before = {run["id"] for run in _runs(served, deployment)}
    page.locator("textarea").first.fill("from-the-form")  # Run Id, the first free text
    page.get_by_role("button", name="Submit").click()
    until(lambda: len(_runs(served, deployment)) > len(before), "a flow run made by the form")
    [made] = [run for run in _runs(served, deployment) if run["id"] not in before]
    assert made["parameters"]["settings"]["run_id"] == "from-the-form"
    served.call("POST", f"flow_runs/{made['id']}/set_state", state={"type": "CANCELLING"}, force=False)


def _missing(page: Any) -> list[str]:
    """Return the fields that the page lacks so far: each appears after its part is loaded."""
    shown = page.inner_text("body")
    return [words for words in SHOWN if words not in shown]


def _runs(served: Served, deployment: str) -> list[dict[str, Any]]:
    return served.call("POST", "flow_runs/filter", deployments={"id": {"any_": [deployment]}})
