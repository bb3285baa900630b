"""The screenshots of docs/guides: everything that a person clicks there is clicked here, on a real run.

    roundhouse up                                      in the directory whose runs are to be shown
    python tools/guide_screenshots.py --state .roundhouse --run quickstart --to docs/images/guides

    start      the deployments, the form of `train`, filled in
    run        the flow run, one iteration, what it reports
    schedule   the deployment `collect` with its schedule, the dataset's flow runs
    resume     a failed run with its failed stage; Retry is pressed, and it is waited for (--failed RUN)
    inspect    the run's curves in MLflow, its datasets and traces, the registered model

Pictures are reduced to 96 colours to stay small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from playwright.sync_api import sync_playwright

from roundhouse.infra.services import Services, status

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SIZE = {"width": 1280, "height": 800}
PATIENCE_MS = 60_000
RETRY_SECONDS = 600.0


class Guide:
    """A browser in front of the two pages."""

    def __init__(self, browser: Any, services: Services, directory: Path) -> None:
        self._browser, self.prefect, self.mlflow = browser, services.prefect_ui_url, services.mlflow_url
        self._auth, self._directory = services.prefect_auth_string, directory
        self.api = httpx.Client(
            base_url=f"{self.prefect}/api", auth=httpx.BasicAuth(*self._auth.split(":")), timeout=60
        )

    def shoot(
        self, name: str, url: str, ready: str, act: Callable[[Any], None] | None = None, height: int = 800
    ) -> None:
        """Open the address, wait for a text, do something, take the picture."""
        page = self._browser.new_page(viewport=SIZE | {"height": height}, color_scheme="light")
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(f"localStorage.setItem('prefect-password', btoa('{self._auth}'))")
        page.goto(url, wait_until="domcontentloaded")
        try:
            page.get_by_text(ready).first.wait_for()
        except PlaywrightTimeout:
            page.screenshot(path=self._directory / f"{name}-failed.png")
            sys.exit(f"{name}: {url} does not show {ready!r}; see {name}-failed.png.")
        page.wait_for_timeout(2500)  # charts draw themselves in a moment
        if act is not None:
            act(page)
            page.wait_for_timeout(1500)
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(96, dither=Image.Dither.NONE)
        image.save(self._directory / f"{name}.png", optimize=True)
        page.close()

    def call(self, path: str, **body: Any) -> Any:
        """Prefect's API."""
        reply = self.api.post(path, json=body)
        return reply.raise_for_status().json()

    def newest_flow_run(self, run_id: str, flow: str) -> dict[str, Any]:
        found = self.call(
            "flow_runs/filter",
            flows={"name": {"any_": [flow]}},
            flow_runs={"name": {"like_": run_id}} if flow == "train" else {"tags": {"all_": [f"run:{run_id}"]}},
            sort="START_TIME_DESC",
            limit=1,
        )
        if not found:
            sys.exit(f"Prefect at {self.prefect} has no flow run of {flow} for run {run_id}.")
        return dict(found[0])

    def deployment(self, name: str) -> str:
        reply = self.api.get(f"deployments/name/{name}/{name}")
        return str(reply.raise_for_status().json()["id"])


def start(guide: Guide) -> None:
    guide.shoot("deployments", f"{guide.prefect}/deployments", "evaluate", height=620)
    url = f"{guide.prefect}/deployments/deployment/{guide.deployment('train')}/run"

    def fill(page: Any) -> None:
        page.locator("textarea").first.fill("my-first-run")

    guide.shoot("train-form", url, "Learning Rate", fill, height=1500)


def run(guide: Guide, run_id: str) -> None:
    flow_run = guide.newest_flow_run(run_id, "train")
    guide.shoot("flow-run", f"{guide.prefect}/runs/flow-run/{flow_run['id']}", "Subflow Runs", height=900)
    iteration = guide.newest_flow_run(run_id, "iteration")
    guide.shoot("iteration", f"{guide.prefect}/runs/flow-run/{iteration['id']}", "Subflow Runs", height=900)
    pages = guide.call(
        "artifacts/filter",
        artifacts={"key": {"any_": [f"{run_id}-iteration"]}, "type": {"any_": ["markdown"]}},
        sort="CREATED_DESC",
        limit=1,
    )
    if pages:
        guide.shoot("artifact", f"{guide.prefect}/artifacts/artifact/{pages[0]['id']}", "requested", height=1000)


def schedule(guide: Guide) -> None:
    guide.shoot("schedule", f"{guide.prefect}/deployments/deployment/{guide.deployment('collect')}", "Schedules")


def resume(guide: Guide, run_id: str) -> None:
    flow_run = guide.newest_flow_run(run_id, "train")["id"]
    url = f"{guide.prefect}/runs/flow-run/{flow_run}"
    guide.shoot("failed-run", url, "Failed", height=900)

    def retry(page: Any) -> None:
        page.get_by_role("button", name="Retry").first.click()
        page.get_by_role("button", name="Retry").last.click()
        deadline = time.monotonic() + RETRY_SECONDS
        while _state(guide, flow_run) != "COMPLETED":
            if time.monotonic() > deadline:
                sys.exit(f"{run_id} was retried and is {_state(guide, flow_run)} after {RETRY_SECONDS:.0f} s.")
            page.wait_for_timeout(1000)
        page.wait_for_timeout(3000)

    guide.shoot("retried-run", url, "Failed", retry, height=900)


def _state(guide: Guide, flow_run: str) -> str:
    return str(guide.api.get(f"flow_runs/{flow_run}").json()["state"]["type"])


def inspect(guide: Guide, run_id: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(guide.mlflow)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"attributes.run_name = '{run_id}'", max_results=1)
    if not found:
        sys.exit(f"MLflow at {guide.mlflow} has no run named {run_id}.")
    info = found[0].info
    base = f"{guide.mlflow}/#/experiments/{info.experiment_id}"

    def search(page: Any) -> None:
        _close_assistant(page)
        page.get_by_placeholder("Search metric charts").fill("reward")
        page.wait_for_timeout(2000)

    guide.shoot("mlflow-run", f"{base}/runs/{info.run_id}", "Registered models", _close_assistant, height=900)
    guide.shoot("mlflow-curves", f"{base}/runs/{info.run_id}/model-metrics", "Model metrics", search, height=900)
    guide.shoot("mlflow-traces", f"{base}/runs/{info.run_id}/traces", "Trace ID", _close_assistant, height=700)
    guide.shoot("mlflow-models", f"{guide.mlflow}/#/models/{run_id}", "Versions", _close_assistant, height=600)


def _close_assistant(page: Any) -> None:
    """MLflow opens it beside everything on a first visit."""
    close = page.get_by_role("button", name="Close").first
    if close.count():
        close.click()
        page.wait_for_timeout(1500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path(".roundhouse"))
    parser.add_argument("--run", required=True, help="a run that has finished")
    parser.add_argument("--failed", help="a run that has failed, whose cause is mended")
    parser.add_argument("--to", type=Path, default=Path("docs/images/guides"))
    parser.add_argument("--only", choices=["start", "run", "schedule", "resume", "inspect"])
    given = parser.parse_args()
    services = status(given.state / "services")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("There is no chromium on this machine.")
    given.to.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        guide = Guide(browser, services, given.to)
        parts: dict[str, Callable[[], None]] = {
            "start": lambda: start(guide),
            "run": lambda: run(guide, given.run),
            "schedule": lambda: schedule(guide),
            "inspect": lambda: inspect(guide, given.run),
        }
        if given.failed is not None:
            parts["resume"] = lambda: resume(guide, given.failed)
        for name, part in parts.items():
            if given.only in (None, name):
                part()
                sys.stdout.write(f"{name}: done\n")
        browser.close()


if __name__ == "__main__":
    main()
