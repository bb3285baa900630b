"""The screenshots of docs/viewer.md, from a run; with --story those of docs/replay.md, from a store in which its commands ran.

    python tools/viewer_screenshots.py --store .roundhouse/store --run quickstart [--iteration 3] [--to docs/images]
    python tools/viewer_screenshots.py --store STORE --run bug --story --iteration 4

Starts a viewer over the store, opens it in chromium, and writes pictures: a rollout beside the table, its tokens by
log-probability, and the run's first evaluation compared with its last; of the story, the verdicts before and after, and the
replay. Pictures are reduced to 96 colours to stay small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SIZE = {"width": 1280, "height": 720}


def pictures(address: str, run: str, iteration: int | None) -> dict[str, tuple[str, str]]:
    """Theme and address of each picture, by name."""
    curve = httpx.get(f"{address}api/curve", params={"run": run}, timeout=60).raise_for_status().json()
    evaluated = [point["iteration"] for point in curve if "evaluate" in point["stages"]]
    chosen = (
        iteration if iteration is not None else max(point["iteration"] for point in curve if "train" in point["stages"])
    )
    scope: dict[str, Any] = {"run": run, "iteration": chosen}
    rows = httpx.get(f"{address}api/rollouts", params={**scope, "sort": "-turns"}, timeout=60).json()["rows"]
    row = max(rows, key=lambda row: (row["turns"], row["reward"] or 0, row["advantage"] or 0))
    opened = {**scope, "rollout": row["rollout_id"], "at": chosen}
    found = {
        "viewer-rollout": ("light", urlencode(opened)),
        "viewer-tokens": ("dark", urlencode({**opened, "tab": "tokens", "channel": "logprob"})),
    }
    if len(evaluated) > 1:
        sides = {"run": run, "iteration": evaluated[0], "stage": "evaluate", "view": "compare"}
        sides |= {"b_run": run, "b_iteration": evaluated[-1], "b_stage": "evaluate"}
        compared = httpx.get(f"{address}api/compare", params=sides, timeout=60).json()["tasks"]
        found["viewer-compare"] = ("light", urlencode({**sides, "task": compared[0]["task"]}))
    return found


def story_pictures(address: str, run: str, iteration: int) -> dict[str, tuple[str, str]]:
    """The recorded rewards beside those of the mended verifier, and what they would have taught."""
    sides = {"run": run, "iteration": iteration, "stage": "collect", "view": "compare"}
    sides |= {"b_run": "datasets/mended", "b_iteration": iteration, "b_stage": "collect"}
    compared = httpx.get(f"{address}api/compare", params=sides, timeout=60).json()["tasks"]
    return {
        "replay-verdicts": ("light", urlencode({**sides, "task": compared[0]["task"]})),
        "replay-taught": ("light", urlencode({"run": run, "iteration": iteration, "view": "replays"})),
    }


def shoot(address: str, wanted: dict[str, tuple[str, str]], directory: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("There is no chromium on this machine.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        for name, (theme, query) in wanted.items():
            page = browser.new_page(viewport=SIZE, color_scheme=theme)
            page.goto(f"{address}?{query}")
            page.wait_for_selector("body.ready:not(.busy)")
            page.wait_for_timeout(1500)
            if "tab=tokens" in query:
                page.evaluate("document.querySelector('.pane').scrollTop = 320")
                page.hover(".block.said .t-logprob >> nth=0")
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(96, dither=Image.Dither.NONE)
            image.save(directory / f"{name}.png", optimize=True)
            page.close()
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default=".roundhouse/store")
    parser.add_argument("--run", required=True)
    parser.add_argument("--iteration", type=int)
    parser.add_argument("--story", action="store_true")
    parser.add_argument("--to", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    command = [str(Path(sys.executable).with_name("roundhouse")), "view", "--store", arguments.store]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[0]
        story = story_pictures(address, arguments.run, arguments.iteration or 1) if arguments.story else None
        shoot(address, story or pictures(address, arguments.run, arguments.iteration), arguments.to)
    finally:
        process.terminate()
        process.wait(10)


if __name__ == "__main__":
    main()
