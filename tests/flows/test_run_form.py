"""The form of the `train` deployment in the Prefect page, in a real browser: its fields are seen, and start a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.served import Served, until

pytestmark = pytest.mark.timeout(600)

CHROMIUM = Path("/usr/bin/chromium")
PAGE_SECONDS = 120_000
"""Milliseconds; Prefect's page takes long to load on a busy machine."""
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


@pytest.fixture
def page() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: install chromium to drive the page")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 2600})
        page.set_default_timeout(PAGE_SECONDS)
        yield page
        browser.close()


def test_a_run_is_started_from_the_form(page: Any, served: Served) -> None:
    deployment = served.deployment("train")["id"]
    page.goto(
        f"{served.services.prefect_ui_url}/deployments/deployment/{deployment}/run", wait_until="domcontentloaded"
    )
    until(lambda: not _missing(page), "every field", lambda: f"{_missing(page)} of {page.inner_text('body')}")
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
    """What the page does not show yet: each field appears when its own part is loaded."""
    shown = page.inner_text("body")
    return [words for words in SHOWN if words not in shown]


def _runs(served: Served, deployment: str) -> list[dict[str, Any]]:
    return served.call("POST", "flow_runs/filter", deployments={"id": {"any_": [deployment]}})
