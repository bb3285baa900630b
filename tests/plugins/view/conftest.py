"""A store with a hostile run, a viewer over it as a person starts it, and a browser."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from roundhouse.stages.datasets import TaskDraw
from roundhouse.store.location import Location
from roundhouse.store.run import Run
from tests.sql.stores import HOSTILE, begin_stage, write_dataset, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]

SLOWER = "train.optimizer.learning_rate=0.01"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`a`: three iterations, the last partly collected; a complete and an incomplete replay of it, and branches. `b`: its
    policy writes markup. `wide`: 400 rollouts. And two nights collected by `a`."""
    store = str(tmp_path_factory.mktemp("view") / "store")
    run = write_run(store, "a")
    begin_stage(run, 3, attempts=1)
    for day in (21, 22):
        write_dataset(run, "nightly", TaskDraw.of_moment(datetime(2026, 11, day, 2, tzinfo=UTC)), version=day - 21)
    branched = Location(store) / "datasets"
    night = branched / "nightly/20261121T020000Z-v000000"
    for name in night.tree():
        branched.write(f"branches/a-i000002-v000001-0123abcd/{name}", night.read(name))
    write_replays(run)
    write_run(store, "b", seed=1, said=f"{HOSTILE} é😀")
    write_run(store, "wide", iterations=1, tasks=100)
    return store


def write_replays(run: Run) -> None:
    """Write `slower`, with a second stage that differs by a key, and `open`, which is not complete."""
    request = {"run_id": run.run_id, "iterations": [1, 2], "stages": ["train"], "set": [SLOWER], "inputs": {}}
    same = {
        "iteration": 1, "stage": "train", "outcome": "equal", "rows": {}, "weights": [], "metrics": {}, "counts": {},
        "distribution": {}, "because": [], "drift": None,
    }  # fmt: skip
    other = same | {
        "iteration": 2,
        "outcome": "differs",
        "because": ["configuration: train.optimizer.learning_rate 0.1 -> 0.01"],
        "rows": {"columns": {"before": 12, "after": 12, "changed": 5, "columns": ["advantage"]}},
        "metrics": {"train/loss": [0.25, 0.5]},
    }
    compared = {"uri": "", "request": request, "changed": {}, "stages": [same, other], "first": None, "stopped": None}
    for name in ("slower", "open"):
        place = Location(run.config.store) / f"replays/{name}"
        place.write("run.json", json.dumps({"created_at": 1.0, "replay": request}).encode())
        if name == "slower":
            place.write("comparison.json", json.dumps(compared).encode())


@contextlib.contextmanager
def viewing(store: str) -> Iterator[str]:
    """Yield the address of a viewer in a separate process."""
    command = [str(Path(sys.executable).with_name("roundhouse")), "view", "--store", store]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()
        assert address, "the viewer ended before it answered"
        yield address[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(15)


@pytest.fixture(scope="session")
def url(store: str) -> Iterator[str]:
    with viewing(store) as address:
        yield address


@pytest.fixture(scope="package")  # it holds an event loop, in which nothing else of this process can run one
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A page that records its errors and requests; only requests to the viewer are allowed."""
    context = browser.new_context(viewport={"width": 1400, "height": 850})
    context.set_default_timeout(20_000)  # of a machine that does other things too
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    # What the server refuses, the page tells; the browser's own note of the 404 is no fault.
    page.on(
        "console", lambda said: faults.append(said.text) if said.type == "error" and "404" not in said.text else None
    )
    page.on(
        "request", lambda asked: None if asked.url.startswith((url, "data:", "file:")) else faults.append(asked.url)
    )
    yield page
    assert page.evaluate("window.hacked") is None, "the text of a rollout ran"
    assert not faults
    context.close()
