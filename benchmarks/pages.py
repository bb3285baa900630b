"""A long run opened in both pages: seconds until a person sees it.

    python -m benchmarks.pages --state DIR --run soak [--repeats 3]

`--state` is the state directory of a run with many iterations, such as `benchmarks.soak --directory` leaves behind (its
`state`). Starts Prefect and MLflow over it, opens in a real browser what a person would, and prints for each page the seconds
from the address to the first text that only a filled page has, and the bytes that were fetched. A page that shows an error, or
nothing within a minute, ends it with exit code 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import sync_playwright

from roundhouse.infra import services

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
PATIENCE_MS = 60_000


@dataclass(frozen=True)
class Page:
    """A page, and what only the filled one shows."""

    name: str
    url: str
    shows: str
    tab: str | None = None
    """Clicked when the page is there."""


def pages(running: services.Services, run_id: str) -> list[Page]:
    """The pages of a run."""
    from mlflow import MlflowClient

    prefect, mlflow = running.prefect_ui_url, running.mlflow_url
    api = httpx.Client(
        base_url=f"{prefect}/api", auth=httpx.BasicAuth(*running.prefect_auth_string.split(":")), timeout=60
    )
    wanted = {"flow_runs": {"name": {"any_": [f"train {run_id}"]}}, "sort": "START_TIME_DESC", "limit": 1}
    train = api.post("flow_runs/filter", json=wanted).raise_for_status().json()[0]
    last = {"flow_runs": {"parent_flow_run_id": {"any_": [train["id"]]}}, "sort": "START_TIME_DESC", "limit": 1}
    iteration = api.post("flow_runs/filter", json=last).raise_for_status().json()[0]
    count = api.post("flow_runs/count", json={"flow_runs": last["flow_runs"]}).json()
    sys.stdout.write(f"{run_id}: {count} iterations in Prefect\n")
    client = MlflowClient(mlflow)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    info = client.search_runs(experiments, f"attributes.run_name = '{run_id}'", max_results=1)[0].info
    base = f"{mlflow}/#/experiments/{info.experiment_id}"
    return [
        Page("Prefect: runs", f"{prefect}/runs", iteration["name"]),
        Page("Prefect: the run", f"{prefect}/runs/flow-run/{train['id']}", "Subflow Runs"),
        Page(
            "Prefect: its iterations", f"{prefect}/runs/flow-run/{train['id']}", iteration["name"], tab="Subflow Runs"
        ),
        Page("Prefect: the newest iteration", f"{prefect}/runs/flow-run/{iteration['id']}", iteration["name"]),
        Page("MLflow: runs", f"{base}/runs", run_id),
        Page("MLflow: the run", f"{base}/runs/{info.run_id}", "reward/mean"),
        Page("MLflow: its curves", f"{base}/runs/{info.run_id}/model-metrics", "reward"),
    ]


def opened(browser: Any, page: Page, auth: str) -> tuple[float, float]:
    """Seconds until it is seen, MB fetched."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(PATIENCE_MS)
    tab.add_init_script(f"localStorage.setItem('prefect-password', btoa('{auth}'))")
    fetched = 0
    session = tab.context.new_cdp_session(tab)
    session.send("Network.enable")

    def add(event: dict[str, Any]) -> None:
        nonlocal fetched
        fetched += int(event["encodedDataLength"])

    session.on("Network.loadingFinished", add)
    began = time.monotonic()
    tab.goto(page.url, wait_until="domcontentloaded")
    try:
        if page.tab is not None:
            tab.get_by_text(page.tab).first.click()
        tab.get_by_text(page.shows).first.wait_for()
    except PlaywrightTimeout:
        sys.exit(f"{page.name}: {page.url} does not show {page.shows!r} within {PATIENCE_MS / 1000:.0f} s.")
    seconds = time.monotonic() - began
    tab.close()
    return seconds, fetched / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--run", default="soak")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("There is no chromium on this machine.")
    state = given.state / "services"
    running = services.up(state, ("prefect", "mlflow"))
    results = []
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
            for page in pages(running, given.run):
                tries = [opened(browser, page, running.prefect_auth_string) for _ in range(given.repeats)]
                seconds, fetched = statistics.median(each[0] for each in tries), max(each[1] for each in tries)
                sys.stdout.write(f"{page.name:<32} {seconds:6.2f} s   {fetched:7.2f} MB\n")
                results.append({"case": page.name, "value": round(seconds, 3), "unit": "s"})
            browser.close()
    finally:
        services.down(state)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    sys.stdout.write(json.dumps({"bench": "pages", "results": results, "machine": machine}) + "\n")


if __name__ == "__main__":
    main()
