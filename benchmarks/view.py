"""The viewer over 100,000 rollouts: how long until the first page, and until one rollout, on disk and in a bucket.

    python benchmarks/view.py [--rollouts 100000] [--repeats 3] [--no-s3]

Two stores of this many rollouts: `one`, a single iteration (parts of 1,000 rollouts, as a collector flushes them), and `many`,
iterations of 2,000. Each rollout has two turns, a conversation of about 1.5 KB and 320 tokens; words repeat after 1,000
rollouts, ids and rewards do not. Each case starts a viewer afresh, as `roundhouse view` does, so that nothing is in memory, and
measures in this process over HTTP: `first page` is all that the page asks before it shows rows (page, scripts, run, filters,
rows); `first rows in a browser` is the same in chromium, from the address to the rows on the screen. S3 is moto on this
machine: a server in Python, slower than a bucket for each request. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import httpx
import numpy as np
import psutil
import pyarrow as pa

from roundhouse.config.loading import parse_config
from roundhouse.store.run import open_run
from roundhouse.trajectories.records import Rollout, Status, Turn
from roundhouse.trajectories.schemas import QUARANTINE, SEQUENCES, rollouts_table, turns_table

GROUP, PART, AN_ITERATION = 8, 1_000, 2_000
LIMITS = {"disk": 1.0, "s3": 3.0, "rollout": 0.2}
WORDS = [f"word{number}" for number in range(500)]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def make_store(store: str, run_id: str, rollouts: int, an_iteration: int) -> None:
    """A run of so many rollouts in iterations of so many."""
    run = open_run(
        parse_config({"run_id": run_id, "store": store, "rollout": {"prompts_per_iteration": 100, "group_size": GROUP}})
    )
    pattern = [_rollout(random.Random(number), number) for number in range(PART)]
    base = rollouts_table(pattern), turns_table(pattern)
    begun = 0
    for iteration in range(1, -(-rollouts // an_iteration) + 1):
        count = min(an_iteration, rollouts - begun)
        collect = run.begin(run.stage(iteration, "collect"), policy_version=iteration - 1)
        for first in range(begun, begun + count, PART):
            collect.write_table("turns", _renamed(base[1], first))
            collect.write_table("rollouts", _renamed(base[0], first))
        collected = collect.commit(counts={"requested": count}, metrics={"reward/mean": 0.5})
        sequences = pa.concat_tables(
            [_renamed(_sequences(pattern), first) for first in range(begun, begun + count, PART)]
        )
        validate = run.begin(run.stage(iteration, "validate"), policy_version=iteration - 1)
        validate.write_table("sequences", sequences)
        validate.write_table("quarantine", QUARANTINE.empty_table())
        validated = validate.commit(inputs={"rollouts": collected})
        train = run.begin(run.stage(iteration, "train"), policy_version=iteration - 1)
        train.write_table("columns", _columns(sequences))
        train.commit(inputs={"sequences": validated})
        begun += count


def _rollout(rng: random.Random, number: int) -> Rollout:
    said = [" ".join(rng.choice(WORDS) for _ in range(100)) for _ in range(2)]
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": f"Question {number}"}]
    turns, length = [], 0
    for index, text in enumerate(said):
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
        new, generated = [[rng.randrange(30_000) for _ in range(size)] for size in (60, 100)]
        length += len(new)
        log_probs = [-rng.expovariate(2) for _ in generated]
        turns.append(Turn(index, index - 1 if index else None, new, length, "", generated, log_probs, 0, "stop", 0.5))
        length += len(generated)
    return Rollout(
        group_id=f"g{number // GROUP}",
        sample=number % GROUP,
        task={"task_id": f"g{number // GROUP}", "answer": number},
        environment=("math", "tools", "search")[number % 3],
        status=Status.COMPLETED,
        seed=number,
        reward=round(rng.random(), 2),
        items=items,
        turns=turns,
        finish_reason="stop",
        seconds=rng.random(),
    )


def _renamed(table: pa.Table, first: int) -> pa.Table:
    """The pattern's rows as those of the rollouts from `first` on."""
    numbers = {f"g{n // GROUP}/{n % GROUP}": (n + first) for n in range(PART)}
    own = [numbers[name] for name in table.column("rollout_id").to_pylist()]
    columns = {
        "rollout_id": [f"task{n // GROUP:06d}/{n % GROUP}" for n in own],
        "group_id": [f"task{n // GROUP:06d}" for n in own],
        "sequence_id": [f"task{n // GROUP:06d}/{n % GROUP}/0" for n in own],
    }
    for name in set(columns) & set(table.column_names):
        table = table.set_column(table.column_names.index(name), name, pa.array(columns[name]))
    return table


def _sequences(pattern: list[Rollout]) -> pa.Table:
    rows = []
    for rollout in pattern:
        ids = [token for turn in rollout.turns for token in (*turn.prompt_token_ids, *turn.generation_token_ids)]
        mask = [
            m
            for turn in rollout.turns
            for m in (*[0] * len(turn.prompt_token_ids), *[1] * len(turn.generation_token_ids))
        ]
        recorded = iter([value for turn in rollout.turns for value in turn.generation_log_probs])
        rows.append(
            {
                "sequence_id": "",
                "rollout_id": rollout.rollout_id,
                "group_id": rollout.group_id,
                "token_ids": ids,
                "loss_mask": mask,
                "gen_logprobs": [next(recorded) if on else 0.0 for on in mask],
                "policy_version": 0,
                "version_spans": [{"version": 0, "start": 0, "end": len(ids)}],
                "reward": rollout.reward,
                "truncated": False,
                "reward_components": [],
                "rollout_generated_tokens": sum(mask),
            }
        )
    return pa.Table.from_pylist(rows, schema=SEQUENCES)


def _columns(sequences: pa.Table) -> pa.Table:
    rewards = sequences.column("reward").to_numpy()
    own = {name: sequences.column(name) for name in ("sequence_id", "rollout_id", "group_id", "reward")}
    return pa.table(
        own
        | {
            "advantage": rewards - rewards.mean(),
            "trained": np.ones(len(rewards), dtype=bool),
            "trained_tokens": np.full(len(rewards), 200),
            "trainer_logprobs": sequences.column("gen_logprobs"),
        }
    )


@contextmanager
def viewer(store: str) -> Iterator[tuple[str, psutil.Process]]:
    """A viewer in a process of its own; its address and the process."""
    command = [str(Path(sys.executable).with_name("roundhouse")), "view", "--store", store]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "300"})
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[0], psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@contextmanager
def bucket(directory: Path) -> Iterator[str]:
    """The store of a directory, in a bucket."""
    import s3fs

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(os.environ["AWS_ENDPOINT_URL"], timeout=2)
                break
            except httpx.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        there = s3fs.S3FileSystem()
        there.call_s3("create_bucket", Bucket="bench")
        there.put(str(directory) + "/", "bench/store/", recursive=True)
        yield "s3://bench/store"
    finally:
        process.kill()
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def first_page(client: httpx.Client, scope: dict[str, Any]) -> None:
    """What the page asks until it shows rows."""
    for path in ("", "static/style.css", "static/app.js", "api/store"):
        client.get(path).raise_for_status()
    client.get("api/run", params={"run": scope["run"]}).raise_for_status()
    client.get("api/facets", params=scope).raise_for_status()
    assert client.get("api/rollouts", params=scope | {"limit": 200}).raise_for_status().json()["rows"]


def in_browser(address: str, scope: dict[str, Any]) -> float | None:
    """Seconds from the address to rows on the screen; None where there is no chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page()
        page.goto("about:blank")
        query = "&".join(f"{name}={value}" for name, value in scope.items())
        begun = time.perf_counter()
        page.goto(f"{address}?{query}", wait_until="commit")
        page.wait_for_selector(".rows .row[data-rollout]", timeout=120_000)
        seconds = time.perf_counter() - begun
        browser.close()
    return seconds


def measure(store: str, where: str, run_id: str, repeats: int, rollouts: int) -> list[tuple[str, float, str]]:
    """All figures of one run in one place."""
    scope: dict[str, Any] = {"run": run_id, "iteration": 1 if run_id == "one" else "all"}
    pages, screens, computing = [], [], []
    shown: dict[str, list[float]] = {"one rollout": [], "next page": [], "sort": []}
    search, reading = 0.0, 0.0
    for _ in range(repeats):
        with viewer(store) as (address, process), httpx.Client(base_url=address, timeout=120) as client:
            before = cpu_seconds(process)
            pages.append(timed(partial(first_page, client, scope)))
            computing.append(cpu_seconds(process) - before)
            before = cpu_seconds(process)
            rng = random.Random(7)
            for _ in range(15):
                number = rng.randrange(rollouts)
                wanted = {"rollout": f"task{number // GROUP:06d}/{number % GROUP}"}
                wanted["rollout_iteration"] = str(1 if run_id == "one" else 1 + number // AN_ITERATION)
                begun = time.perf_counter()
                answer = client.get("api/rollout", params=scope | wanted).raise_for_status().json()
                shown["one rollout"].append(time.perf_counter() - begun)
                assert answer["streams"][0]["mask"], "a rollout without its tokens would be quick"
            reading = (cpu_seconds(process) - before) / 15
            for _ in range(15):
                offset = rng.randrange(rollouts - 200)
                page = scope | {"offset": offset, "limit": 200}
                shown["next page"].append(timed(partial(client.get, "api/rollouts", params=page)))
                ordered = page | {"sort": "-reward"}
                shown["sort"].append(timed(partial(client.get, "api/rollouts", params=ordered)))
            search = timed(partial(client.get, "api/rollouts", params=scope | {"q": "question 77"}))
        with viewer(store) as (address, _):
            if (seconds := in_browser(address, scope)) is not None:
                screens.append(seconds)
    name = f"{where}, {'one iteration' if run_id == 'one' else f'iterations of {AN_ITERATION}'}"
    found = [(f"{name}: first page", statistics.median(pages), f"s (limit {LIMITS[where]:g})")]
    found.append((f"{name}: first page, CPU of the viewer", statistics.median(computing), "CPU s"))
    found.append((f"{name}: one rollout, CPU of the viewer", reading, "CPU s"))
    if screens:
        found.append((f"{name}: first rows in a browser", statistics.median(screens), "s"))
    for case, values in shown.items():
        limit = f" (limit {LIMITS['rollout']:g})" if case == "one rollout" else ""
        found.append((f"{name}: {case}, median", statistics.median(values), f"s{limit}"))
        found.append((f"{name}: {case}, slowest of {len(values)}", max(values), "s"))
    return [*found, (f"{name}: search in all texts, first time", search, "s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-s3", action="store_true")
    arguments = parser.parse_args()
    results: list[tuple[str, float, str]] = []
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        make_store(str(store), "one", arguments.rollouts, arguments.rollouts)
        make_store(str(store), "many", arguments.rollouts, AN_ITERATION)
        size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        results.append(("store", size / 2**20, "MiB"))
        for run_id in ("one", "many"):
            results += measure(str(store), "disk", run_id, arguments.repeats, arguments.rollouts)
        if not arguments.no_s3:
            with bucket(store) as uri:
                for run_id in ("one", "many"):
                    results += measure(uri, "s3", run_id, arguments.repeats, arguments.rollouts)
    for case, value, unit in results:
        print(f"{case:<64}{value:>9.3f} {unit}")
    rows = [
        {"case": case, "value": round(value, 4), "unit": unit, "peer": None, "ratio": None}
        for case, value, unit in results
    ]
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    machine |= {"pyarrow": pa.__version__, "duckdb": duckdb.__version__}
    print("\n" + json.dumps({"bench": "view", "results": rows, "machine": machine}))


if __name__ == "__main__":
    main()
